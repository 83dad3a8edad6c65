"""Contract of every engine class: its role's protocol, methods that a runtime can call, and abilities that are true."""

import inspect

import pytest

from unirl.rollout.engine.base import BaseDiffusionEngine, BaseRolloutEngine
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.rollout.engine.offline.engine import OfflineRolloutEngine
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.rollout.engine.replica.text import ReplicaTextEngine
from unirl.rollout.engine.sglang_diffusion.engine import SGLangDiffusionEngine
from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.types.errors import ConfigError
from unirl.types.protocols.engines import DiffusionRolloutEngine, RolloutEngine, TextRolloutEngine
from unirl.types.roles import remote_method

DIFFUSION = (TrainsideRolloutEngine, OfflineRolloutEngine, ReplicaRolloutEngine, SGLangDiffusionEngine)
TEXT = (TrainsideTextEngine, ReplicaTextEngine, VLLMRolloutEngine, SGLangRolloutEngine)
REMOTE = ("generate", "check_prompts", "sleep", "wake_up", "shutdown")
RECEIVING = ("wait_until_ready", "begin_weights", "receive_weights", "finish_weights", "load_adapter")


def has_own(engine, name):
    return getattr(engine, name) is not getattr(BaseRolloutEngine, name)


@pytest.mark.parametrize("engine", DIFFUSION)
def test_an_engine_of_images_is_whole(engine):
    assert issubclass(engine, DiffusionRolloutEngine) and issubclass(engine, BaseDiffusionEngine)
    for name in ("plan", "encodes_ahead", "encode_ahead", "drop_text_encoders"):
        remote_method(engine, name)


@pytest.mark.parametrize("engine", TEXT)
def test_an_engine_of_texts_is_whole(engine):
    assert issubclass(engine, TextRolloutEngine) and not issubclass(engine, DiffusionRolloutEngine)


@pytest.mark.parametrize("engine", DIFFUSION + TEXT)
def test_what_an_engine_declares_is_what_it_has(engine):
    assert issubclass(engine, RolloutEngine)
    for name in REMOTE + (RECEIVING if engine.has_own_weights else ()):
        remote_method(engine, name)
    assert engine.has_own_weights == all(hasattr(engine, name) for name in (*RECEIVING, "policy_version"))
    assert engine.can_abort == has_own(engine, "abort")
    assert engine.can_sleep == has_own(engine, "sleep") == has_own(engine, "wake_up")
    keywords = set(inspect.signature(engine).parameters)
    if "processes" in keywords:
        keywords |= set(inspect.signature(EngineProcesses).parameters)
    for option in (engine.sleep_option, engine.adapter_option):
        assert option is None or option in keywords
    assert engine.has_own_model == ("bundle" in keywords)
    assert not (engine.has_own_model and engine.has_trainer_logp)


def test_a_base_refuses_what_it_cannot_do():
    class Whole(BaseDiffusionEngine):
        def plan(self, params):
            raise NotImplementedError

        def generate(self, req, policy=None):
            raise NotImplementedError

    engine = Whole()
    assert not engine.encodes_ahead()
    with pytest.raises(ConfigError, match="Whole cannot end a rollout early"):
        engine.abort()
    with pytest.raises(ConfigError, match=r"Whole makes whole responses only.*reward.is_async: false"):
        engine.announce_to(print)
