"""The client for asyncio: the methods and arguments of ``attnd.Client``, as coroutines.

::

    import asyncio, attnd.aio, numpy as np

    async def main():
        async with attnd.aio.Client("127.0.0.1:50051") as client:
            async with await client.create_session(num_q_heads=8, num_kv_heads=2, head_dim=64) as session:
                q = np.random.randn(5, 8, 64).astype(np.float32)       # [tokens, heads, dim]
                k, v = np.random.randn(2, 5, 2, 64).astype(np.float32)
                out = (await session.step(0, q, k, v)).out             # [5, 8, 64]

    asyncio.run(main())

Results, errors, configs and segments are those of ``attnd``.
"""

from .client import Client
from .session import Session
from .stream import PendingStep, StepStream

__all__ = ["Client", "PendingStep", "Session", "StepStream"]
