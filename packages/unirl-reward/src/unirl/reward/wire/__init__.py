"""Both bodies of POST /score and its answer, as functions of bytes; the reward server and its clients share them."""

from unirl.reward.wire.answer import OWN_REWARD, SampleAnswer, decode_answer, encode_answer, sub_metrics
from unirl.reward.wire.binary_body import BINARY_TYPE, decode_binary, encode_binary
from unirl.reward.wire.json_body import JSON_TYPE, decode_json, encode_json
from unirl.reward.wire.samples import (
    UNLIMITED,
    Kind,
    Limits,
    Pixels,
    SchemaError,
    ScoreCall,
    WireSample,
    batch_key,
    request_of,
    samples_of,
)

__all__ = [
    "BINARY_TYPE",
    "JSON_TYPE",
    "OWN_REWARD",
    "UNLIMITED",
    "Kind",
    "Limits",
    "Pixels",
    "SampleAnswer",
    "SchemaError",
    "ScoreCall",
    "WireSample",
    "batch_key",
    "decode_answer",
    "decode_binary",
    "decode_json",
    "encode_answer",
    "encode_binary",
    "encode_json",
    "request_of",
    "samples_of",
    "sub_metrics",
]
