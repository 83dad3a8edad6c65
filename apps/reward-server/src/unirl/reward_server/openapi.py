"""The OpenAPI document: what the server takes and answers, with its own limits."""

from __future__ import annotations

from typing import Any

from unirl.reward.wire import BINARY_TYPE
from unirl.reward_server.settings import ServerSettings

_TEXT = {"type": "string"}
_STATUS = {
    400: "A value is wrong: an unknown reward, an image that cannot be decoded, something beyond a limit.",
    401: "The token is missing or wrong.",
    408: "The body did not arrive in time.",
    413: "The body is larger than max_body_bytes.",
    415: "Content-Type is neither of the two, or there is a Content-Encoding.",
    422: "The body lacks a field or holds a value of a wrong type.",
    429: "The queue of a reward is full, or every connection is in work; try again after Retry-After seconds.",
    503: "The server is stopping; try another, or again after Retry-After seconds.",
}


def document(settings: ServerSettings, *, needs_token: bool) -> dict[str, Any]:  # Any: JSON values
    """The document of a server with these settings."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "UniRL reward server",
            "version": "0.1.0",
            "description": "Scores generated images, videos, sounds and texts. A sample that cannot be scored has a "
            "reason in `errors` and no number in `results`; the others are scored.",
        },
        "paths": {
            "/score": {"post": _score(settings, needs_token)},
            "/health": {"get": _get("The server runs; state of every replica", _HEALTH, needs_token)},
            "/rewards": {"get": _get("Names of the rewards and what their scorers are", _REWARDS, needs_token)},
            "/ready": {"get": _get("Whether every reward can be scored", _READY, False, 503)},
            "/status.json": {"get": _get("What the status page shows", {"type": "object"}, needs_token)},
            "/metrics": {"get": _get("Prometheus metrics", _TEXT, needs_token, kind="text/plain")},
            "/openapi.json": {"get": _get("This document", {"type": "object"}, False)},
            "/": {"get": _get("The status page", _TEXT, False, kind="text/html")},
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _object({"detail": _TEXT}, ["detail"])},
        },
    }


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:  # Any: JSON values
    return {"type": "object", "properties": properties, "required": required}


_HEALTH = _object(
    {
        "status": {"const": "ok"},
        "rewards": {"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}},
    },
    ["status", "rewards"],
)
_REWARDS = _object(
    {"rewards": {"type": "array", "items": _TEXT}, "scorers": {"type": "object"}}, ["rewards", "scorers"]
)
_READY = _object({"status": {"const": "ready"}}, ["status"])
_ANSWER = _object(
    {
        "results": {
            "type": "array",
            "items": {
                "type": "object",
                "description": "reward -> sub-metric -> number; the first, `reward`, is the scorer's own",
                "additionalProperties": {"type": "object", "additionalProperties": {"type": "number"}},
            },
        },
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "description": "reward -> why it has no number",
                "additionalProperties": _TEXT,
            },
        },
    },
    ["results", "errors"],
)


def _request_schema(settings: ServerSettings) -> dict[str, Any]:  # Any: JSON values
    base64 = {"type": ["string", "null"], "contentEncoding": "base64"}
    text = {"type": ["string", "null"], "maxLength": settings.max_text_chars}
    turn = {
        "type": "object",
        "description": "The last turn has exactly one of image_b64, video_b64, video_path, audio_b64 and completion; "
        "of the turns before it one may have image_b64, the input image of an edit, and one audio_b64, the sound of "
        "the prompt.",
        "properties": {
            "text": text,
            "image_b64": base64 | {"description": f"PNG, JPEG or WebP of at most {settings.max_image_pixels} pixels"},
            "video_b64": base64
            | {
                "description": "animated PNG, GIF, WebP, or mp4 with PyAV, with its sound; at most "
                f"{settings.max_video_frames} frames"
            },
            "video_path": text | {"description": "a file below server.video_roots"},
            "audio_b64": base64
            | {"description": f"WAV, or another sound with PyAV; at most {settings.max_sound_s:g} s"},
            "completion": text | {"description": "a generated text"},
            "fps": {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 1e6},
        },
    }
    sample = {
        "history": {"type": "array", "items": turn, "minItems": 1, "maxItems": 3},
        "required_rewards": {"type": "array", "items": _TEXT, "minItems": 1},
        "metadata": {"type": ["object", "null"]},
        "id": text,
        "group_id": text,
    }
    listed = {
        "type": "array",
        "items": _object(sample, ["history", "required_rewards"]),
        "minItems": 1,
        "maxItems": settings.max_samples,
    }
    return _object({"requests": listed}, ["requests"])


def _score(settings: ServerSettings, needs_token: bool) -> dict[str, Any]:  # Any: JSON values
    binary = {
        "type": "string",
        "format": "binary",
        "description": "One safetensors file: media.<i> and source.<i> as U8 or F32 [H, W, 3] or [T, H, W, 3], "
        "sound.<i> (of a video, or the sample itself) and source_sound.<i> (of the prompt) as F32 [L] or [L, C], at "
        f"most {settings.max_sound_s:g} s, and "
        "metadata unirl_score with the rest as JSON (unirl.reward.wire.binary_body).",
    }
    return _secured(needs_token) | {
        "summary": "Score samples",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _request_schema(settings)},
                BINARY_TYPE: {"schema": binary},
            },
        },
        "responses": {"200": _answer("One entry per sample, in their order", _ANSWER)} | _errors(*_STATUS),
    }


def _get(
    summary: str, schema: dict[str, Any], needs_token: bool, *statuses: int, kind: str = "application/json"
) -> dict[str, Any]:  # Any: JSON values
    errors = _errors(*statuses, *([401] if needs_token else []))
    return _secured(needs_token) | {"summary": summary, "responses": {"200": _answer(summary, schema, kind)} | errors}


def _answer(text: str, schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:  # Any: JSON values
    return {"description": text, "content": {kind: {"schema": schema}}}


def _errors(*statuses: int) -> dict[str, Any]:  # Any: JSON values
    return {str(status): _answer(_STATUS[status], {"$ref": "#/components/schemas/Error"}) for status in statuses}


def _secured(needs_token: bool) -> dict[str, Any]:  # Any: JSON values
    return {"security": [{"token": []}]} if needs_token else {}
