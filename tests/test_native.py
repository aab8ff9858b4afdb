"""Properties of the compiled loop alone: threads, forks, its cache."""

import math
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import dense
from torch.utils.data import DataLoader, Dataset

from qattn import attend
from qattn.tiles import threads


def cloud(seed, n=700):
    return 3 * torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))  # no global state: threads call this


def result(seed):
    points = cloud(seed)
    return attend(points, points, points, backend="native")


def test_the_thread_count_changes_nothing():
    points = cloud(0, 3000)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(attend(points, points, points, backend="native"))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("channels", [3, 20])
def test_sums_over_many_equal_keys(channels):
    """Added one by one in float32, a quarter of a million equal weights would lose three digits."""
    N = 2**18
    value = torch.arange(channels) + torch.arange(N)[:, None] % 3.0
    out, lse = attend(torch.full((2, 3), 0.4), torch.zeros(N, 3), value, backend="native")
    assert (lse - (math.log(N) - 0.24)).abs().max() < 1e-5
    torch.testing.assert_close(out.double(), value.double().mean(0).expand(2, -1), rtol=1e-5, atol=0)


@pytest.fixture(params=["torch's", "our own"])
def pool(request, monkeypatch):
    """Two kinds of threads: those of torch, and those where torch has no OpenMP."""
    if request.param == "our own":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    else:
        assert threads._openmp() is not None


@pytest.mark.usefixtures("pool")
def test_torch_s_thread_count_is_honored(monkeypatch):
    for count in (1, 2, 3):
        workers, barrier = set(), threading.Barrier(count)

        def run(_, workers=workers, together=barrier):
            if threading.get_ident() not in workers:
                workers.add(threading.get_ident())
                together.wait(60)  # for the others, however busy the machine is

        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        threads.share(run, [(n,) for n in range(4 * count)])
        assert len(workers) == count
        assert threading.get_ident() in workers


@pytest.mark.usefixtures("pool")
def test_a_round_begins_when_the_one_before_is_done():
    done = []

    def run(n):
        assert len(done) >= 10 * (n // 10)
        time.sleep(0.001 * (n % 3))
        done.append(n)

    threads.share(run, *([(n,) for n in range(first, first + 10)] for first in range(0, 50, 10)))
    assert sorted(done) == list(range(50))


def test_many_python_threads_at_once():
    expected = [result(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for got, exact in zip(pool.map(result, range(8)), expected, strict=True):
                torch.testing.assert_close(got, exact, rtol=0, atol=0)


def _in_child(seed, queue):
    queue.put([t.tolist() for t in result(seed)])


def test_forked_after_use():
    """The parent has used its threads; a child started by fork must neither hang nor crash."""
    expected = result(3)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(3, queue))
    child.start()
    got = queue.get()
    child.join(60)
    assert child.exitcode == 0
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(have), want, rtol=0, atol=0)


class Clouds(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return result(index).lse


def test_data_loader_workers():
    expected = torch.stack([result(seed).lse for seed in range(6)])
    loader = DataLoader(Clouds(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("pool")
def test_an_interrupt_drops_the_chunks_not_begun():
    done = []

    def run(begin):
        done.append(begin)
        time.sleep(0.001)
        if begin == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        threads.share(run, [(n,) for n in range(10_000)])
    assert len(done) < 1_000


def test_many_small_weights_do_not_round_away():
    """Averages of a constant over a row with a few large weights and very many small ones."""
    key = torch.cat([torch.zeros(64, 1), torch.full((200_000, 1), 6.0)])
    out, _ = attend(torch.zeros(1, 1), key, torch.ones(len(key), 1), backend="native")
    torch.testing.assert_close(out, torch.ones(1, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "distance"), [(torch.float32, 1e8), (torch.float64, 1e16)])
def test_keys_so_far_that_rounding_exceeds_one(dtype, distance):
    """The largest weight of a row is 1 whatever its exponent; it once came out as anything at all."""
    query, key = torch.zeros(70, 3, dtype=dtype), distance * torch.rand(130, 3, dtype=dtype)
    out, lse = attend(query, key, torch.ones(130, 2, dtype=dtype), backend="native")
    _, expected = dense(query, key)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(out, torch.ones_like(out))
