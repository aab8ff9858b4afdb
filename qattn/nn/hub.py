"""Saving to files and to the Hugging Face Hub, if `huggingface_hub` is installed."""

from typing import Any

__all__ = ["HubMixin"]

try:
    from huggingface_hub import PyTorchModelHubMixin as HubMixin
except ImportError:

    class HubMixin:  # type: ignore[no-redef]
        """A replacement without `huggingface_hub`, whose methods raise an error that names what is missing."""

        def __init_subclass__(cls, **_: Any) -> None:
            super().__init_subclass__()

        def save_pretrained(self, *_: Any, **__: Any) -> None:
            raise ImportError(_MISSING)

        def push_to_hub(self, *_: Any, **__: Any) -> None:
            raise ImportError(_MISSING)

        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> None:
            raise ImportError(_MISSING)


_MISSING = "This needs huggingface_hub and safetensors: `pip install qattn-diffusion[hub]`. `state_dict` needs neither."
