"""Hugging Face transformers with their key/value cache in attnd::

    from attnd.transformers import RemoteCache

    with RemoteCache(model, "host:50051") as cache:
        model.generate(**inputs, cache=cache)

Needs ``pip install attnd[transformers]``.
"""

from .cache import RemoteCache

__all__ = ["RemoteCache"]
