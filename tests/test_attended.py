import pytest
import torch

from qattn import Attended, attend, merge


def random_pair(n=20, channels=3):
    return Attended(torch.randn(n, channels, dtype=torch.float64), 10 * torch.randn(n, dtype=torch.float64))


EMPTY = Attended(torch.zeros(20, 3, dtype=torch.float64), torch.full((20,), -torch.inf, dtype=torch.float64))


def test_merge_is_attention_on_the_union():
    query, key, value = (torch.randn(s, c, dtype=torch.float64) for s, c in ((20, 3), (50, 3), (50, 4)))
    bias = torch.randn(50, dtype=torch.float64)
    parts = [attend(query, key[s], value[s], bias=bias[s]) for s in (slice(0, 7), slice(7, 50))]
    torch.testing.assert_close(merge(*parts), attend(query, key, value, bias=bias), rtol=1e-14, atol=1e-14)


def test_merge_is_commutative_and_associative():
    a, b, c = random_pair(), random_pair(), random_pair()
    torch.testing.assert_close(merge(a, b), merge(b, a), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(merge(merge(a, b), c), merge(a, merge(b, c)), rtol=1e-13, atol=1e-13)


def test_nothing_is_the_identity_of_merge():
    pair = random_pair()
    torch.testing.assert_close(merge(pair, EMPTY), pair, rtol=0, atol=0)
    torch.testing.assert_close(merge(EMPTY, pair), pair, rtol=0, atol=0)
    torch.testing.assert_close(merge(EMPTY, EMPTY), EMPTY, rtol=0, atol=0)


def test_merge_of_lse_alone():
    a, b = (Attended(None, random_pair().lse) for _ in range(2))
    out, lse = merge(a, b)
    assert out is None
    torch.testing.assert_close(lse, torch.logaddexp(a.lse, b.lse), rtol=1e-14, atol=1e-14)


def test_merge_refuses_one_with_and_one_without_values():
    with pytest.raises(ValueError, match="`merge` joins two results with values or two without"):
        merge(random_pair(), Attended(None, random_pair().lse))
