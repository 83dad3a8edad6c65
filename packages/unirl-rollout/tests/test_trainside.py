"""The trainside engine over a two-parameter velocity field: requests in, verified responses out."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_fakes import PARAMS, SHAPE, LinearPipeline, engine, request

from unirl.rollout import checks
from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.sde.schedule import compressed_tail, linear_sigmas
from unirl.types.conditions import ImageLatentCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.protocols.engines import RolloutEngine
from unirl.types.rollout import RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.storage import load_rollout


def test_the_engine_obeys_the_protocol_and_plans():
    plan = engine().plan(PARAMS)
    assert isinstance(engine(), RolloutEngine)
    assert plan.latent_shape == SHAPE and plan.kernel == "flow" and plan.sigmas.shape == (5,)


def test_a_response_echoes_the_request_and_carries_versions_and_parameters():
    req = request()
    track = engine().generate(req).root_track()
    assert track.sample_ids == req.sample_ids and track.group_ids == req.group_ids
    segment = track.segment
    assert torch.equal(segment.sigmas, req.sigmas) and segment.sde_indices == [0, 2]
    assert segment.params == PARAMS
    assert track.policy_versions.tolist() == [7] * 4
    assert track.decoded.pixels.shape == (4, *SHAPE)


def test_prompts_are_encoded_before_the_first_chunk_where_encoders_leave_the_device():
    events = []

    class Resting(LinearPipeline):
        encoders_rest = True

        @contextmanager
        def visiting_encoders(self):
            yield
            events.append((len(self.encoded), len(self.batch_sizes)))

    pipeline = Resting()
    engine(pipeline=pipeline, forward_batch_size=2).generate(request(num=4))
    assert events == [(2, 0)]  # both chunks encoded, nothing sampled
    assert pipeline.batch_sizes == [2, 2]


def test_media_may_be_kept_as_bytes():
    floats, kept = (engine(media_bits=bits).generate(request()).root_track().decoded for bits in (32, 8))
    assert floats.pixels.dtype == torch.float32 and kept.pixels.dtype == torch.uint8
    assert (kept.in_floats().pixels - floats.pixels).abs().max() <= 0.5 / 255 + 1e-6
    with pytest.raises(ConfigError, match=r"engine.media_bits = 16 must be one of 8, 32"):
        engine(media_bits=16)


def test_an_engine_that_decodes_nothing_samples_the_same_and_never_asks_for_pixels():
    class Blind(LinearPipeline):
        def decode(self, latents, params):
            raise AssertionError("nothing was to be decoded")

    seen = engine().generate(request()).root_track()
    blind = engine(pipeline=Blind(), decode=False).generate(request()).root_track()
    assert blind.decoded is None and blind.equals(seen.replace(decoded=None))
    with pytest.raises(ConfigError, match="engine.media_bits = 8 does nothing with engine.decode: false"):
        engine(media_bits=8, decode=False)


def test_samples_do_not_depend_on_how_they_are_batched():
    whole = engine(forward_batch_size=4).generate(request()).root_track().segment
    pieces = engine(forward_batch_size=3).generate(request()).root_track().segment
    assert torch.equal(whole.latents, pieces.latents)


def test_batches_are_as_large_as_asked():
    pipeline = LinearPipeline()
    engine(pipeline=pipeline, forward_batch_size=3).generate(request(7))
    assert pipeline.batch_sizes == [3, 3, 1]


def test_chunks_are_announced_in_order_and_are_the_response():
    req = request()
    quiet, loud = engine().generate(req), engine()
    heard = []
    loud.announce_to(heard.append)
    resp = loud.generate(req)
    assert resp.equals(quiet) and RolloutResp.concat(heard).equals(resp)
    assert [chunk.batch_size for chunk in heard] == [2] * (req.batch_size // 2)


def test_an_engine_of_whole_responses_has_nothing_to_announce():
    class Whole(BaseRolloutEngine):
        def plan(self, params):
            raise NotImplementedError

        def generate(self, req, policy=None):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="Whole makes whole responses only.*reward.is_async: false"):
        Whole().announce_to(print)


def test_samples_of_a_group_may_share_their_start_but_not_their_steps():
    segment = engine().generate(request(same_noise=True)).root_track().segment
    start = segment.latents_at(0)
    assert torch.equal(start[0], start[1]) and not torch.equal(start[0], start[2])
    assert not torch.equal(segment.clean_latents[0], segment.clean_latents[1])


def test_given_latents_are_used_verbatim():
    given = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    req = request().replace(request_conditions={"initial_latents": ImageLatentCondition(latents=given)})
    assert torch.equal(engine().generate(req).root_track().segment.latents_at(0), given)


def test_a_named_policy_is_used_and_put_back():
    made = engine()
    current = made.generate(request()).root_track().segment.clean_latents
    old = made.generate(request(), policy="old").root_track().segment.clean_latents
    assert not torch.equal(current, old)
    assert torch.equal(made.generate(request()).root_track().segment.clean_latents, current)


def test_prompts_are_encoded_before_the_encoders_are_dropped():
    pipeline = LinearPipeline()
    assert not engine(pipeline=pipeline).encodes_ahead()
    made = engine(pipeline=pipeline, drop_text_encoders=True)
    assert made.encodes_ahead()
    made.encode_ahead({"text": Texts(texts=["a", "b"])}, PARAMS)
    assert pipeline.encoded == [["a", "b"]] and pipeline.has_encoders
    made.drop_text_encoders()
    assert not pipeline.has_encoders


def test_a_policy_without_a_backend_is_refused():
    pipeline: Any = LinearPipeline()
    alone = TrainsideRolloutEngine(pipeline, forward_batch_size=2)
    with pytest.raises(ConfigError, match="needs the engine to be given the backend"):
        alone.generate(request(), policy="old")


def test_a_dump_holds_request_and_response(tmp_path):
    req = request()
    resp = engine(dump_dir=str(tmp_path)).generate(req)
    loaded, asked = load_rollout(tmp_path / "rollout-000005-rank0.safetensors")
    assert loaded.equals(resp)
    assert asked is not None and asked.sample_ids == req.sample_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigmas": None}, "pins no sigmas"),
        ({"sigmas": torch.linspace(1, 0, 4)}, r"expected float32 \[5\]"),
        ({"sigmas": torch.tensor([1.0, 0.5, 0.6, 0.1, 0.0])}, "must decrease and end with 0"),
        ({"init_noise_latent_shape": None}, "the driver sets both"),
        ({"sampling_params": ARSamplingParams(temperature=1.0)}, "needs DiffusionSamplingParams"),
        ({"sampling_params": replace(PARAMS, sde_strategy="cps")}, "asks for the 'cps' kernel"),
    ],
)
def test_an_incomplete_request_is_refused_with_what_is_wrong(change, message):
    with pytest.raises((ContractError, ConfigError), match=message):
        engine().generate(request().replace(**change))


def test_a_schedule_with_a_compressed_tail_is_sampled_as_it_is_pinned():
    """MixGRPO-Flash: the driver pins fewer steps after the window, and the engine uses that schedule."""
    sigmas = compressed_tail(linear_sigmas(6), 2, 0.4)
    params = replace(PARAMS, num_inference_steps=3, sde_indices=[0, 1], post_solver="dpmpp_2m")
    segment = engine().generate(request(params=params).replace(sigmas=sigmas)).root_track().segment
    assert segment.sigmas.tolist() == sigmas.tolist() and sigmas.tolist() == linear_sigmas(6)[[0, 1, 2, 6]].tolist()
    assert segment.sde_indices == [0, 1] and segment.num_steps == 3
    # The last step is first order whatever the solver: x - sigma v.
    x = segment.latents_at(2)
    torch.testing.assert_close(segment.clean_latents, x - sigmas[2] * (0.5 * x + 0.1), rtol=0, atol=1e-6)


def test_an_engine_that_drifts_from_the_request_is_caught():
    segment = engine().generate(request()).root_track().segment
    other = linear_sigmas(4, shift=1.0)
    with pytest.raises(ContractError, match="the request pinned"):
        checks.verify_segment(segment, other, PARAMS)
    with pytest.raises(ContractError, match=r"made steps \[0, 2\] stochastic"):
        checks.verify_segment(segment, segment.sigmas, replace(PARAMS, sde_indices=[1]))
    broken = segment.replace(sde_logp=segment.sde_logp * float("nan"))
    with pytest.raises(ContractError, match=r"log-probs of samples \[0, 1, 2, 3\]"):
        checks.verify_segment(broken, segment.sigmas, PARAMS)


def test_latents_that_are_not_finite_stop_the_rollout():
    pipeline = LinearPipeline()
    pipeline.b = float("inf")
    with pytest.raises(ContractError, match="not finite"):
        engine(pipeline=pipeline).generate(request())
