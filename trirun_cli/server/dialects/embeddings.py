"""OpenAI's embeddings: POST /v1/embeddings, of the model's last hidden states."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..answer import disconnected
from ..bodies.embeddings import EmbeddingsBody
from ..errors import ApiError
from ..http import sse
from ..pool.pool import Pool


def add(app: FastAPI, pool: Pool) -> None:
    """Add the route to an application."""

    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
        """Vectors of texts: the mean of the model's last hidden states, or the last of them, of length 1."""
        body.check_fields()
        async with pool.use(body.model, request) as service:
            request.state.model = service.names[0]
            work = asyncio.ensure_future(service.embed(body))
            gone = asyncio.ensure_future(disconnected(request))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    return Response(status_code=499)
                vectors, tokens = work.result()
            finally:
                gone.cancel()
                work.cancel()
            name = body.model or service.names[0]
        if body.dimensions is not None and body.dimensions > len(vectors[0]):
            message = f"dimensions: the model has {len(vectors[0])}"
            raise ApiError(400, message, param="dimensions", code="invalid_value")
        document = {"object": "list", "model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        numbers = sum(map(len, vectors)) if body.encoding_format == "float" else len(vectors)
        content = await sse.dumps_of(lambda: {**document, "data": _data(vectors, body)}, numbers // 4)
        return Response(content, media_type="application/json")


def _data(vectors: Sequence[np.ndarray], body: EmbeddingsBody) -> list[dict[str, Any]]:
    return [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
        for index, vector in enumerate(vectors)
    ]


def _encoded(vector: np.ndarray, body: EmbeddingsBody) -> str | list[float]:
    vector = vector[: body.dimensions]
    if body.normalize:
        length = float(np.linalg.norm(vector.astype(np.float64)))
        vector = (vector / length).astype(np.float32) if length else vector
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
