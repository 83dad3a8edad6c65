"""Rules about engines: pushes that they take, samples that can be trained on, and what shares the device when."""

import json
import sys

import pytest
from PIL import Image

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe, machine_findings, run_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

VLLM, SGLANG = "llm/qwen3_4b_dapo_grpo", "parts/engine=text_sglang"
LINEAR = "llm/qwen3_5_9b_dapo_grpo"
SHAPES, REPLICA = "worlds/shapes/flowgrpo", "worlds/shapes/replica"
APART = ["runtime=ray", "num_devices=2", "+placement.train=0", "+placement.rollout=1"]
REMOTE = [
    "+engine.url=http://10.0.0.1:30000",
    "runtime=ray",
    "num_devices=8",
    "+placement.train=0-7",
    "+placement.rollout=0",
]
LORA_SYNC = "sync._target_=unirl.distributed.weight_sync.lora.LoraWeightSync"

OWN_ENGINE = """
from unirl.rollout.engine.base import BaseDiffusionEngine


class Closed(BaseDiffusionEngine):
    gives_logp = False
    gives_latents = False
    takes_initial_latents = False
    takes_step_subsets = False

    def __init__(self, pipeline, policies=None):
        pass
"""


def findings(name, *overrides):
    register_resolvers()
    return list(run_findings(run_of(resolve(compose(name, list(overrides))))))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "worlds/arithmetic/sglang",
            ["parts/train=lora", "engine.max_lora_rank=8", LORA_SYNC],
            "engine.max_lora_rank = 8, but SGLang's adapters need a GPU. Push whole weights",
        ),
        (
            "worlds/arithmetic/vllm",
            ["+engine.gpus=[0,1]"],
            "engine.gpus = [0, 1] does nothing with device: cpu. Set it to null.",
        ),
        (
            VLLM,
            ["+engine.num_devices=4", "+engine.gpus=[6,7]"],
            "engine.num_devices = 4 needs 4 GPUs, engine.gpus = [6, 7] names 2. Change one of them.",
        ),
        (
            VLLM,
            [SGLANG, "+engine.num_devices=2"],
            "engine.num_devices = 2, but a worker of runtime: ray sees one GPU. Name 2 GPUs of its host in",
        ),
        (
            VLLM,
            ["+engine.num_instances=2", "+engine.num_devices=2", "+engine.gpus=[0,1,2]"],
            "engine.num_instances * engine.num_devices = 2 * 2 = 4 needs 4 GPUs, engine.gpus = [0, 1, 2]",
        ),
        (
            "worlds/arithmetic/vllm",
            ["device=cuda", "+engine.num_instances=3"],
            "engine.num_instances * engine.num_devices = 3 * 1 = 3: name the 3 GPUs of this host that they",
        ),
        (
            "worlds/shapes/sglang",
            ["device=cuda", "+engine.num_instances=2", "+engine.gpus=[3]"],
            "engine.num_instances * engine.num_devices = 2 * 1 = 2 needs 2 GPUs, engine.gpus = [3] names 1. Change one",
        ),
        (
            "worlds/shapes/sglang",
            ["+engine.num_devices=2", "+engine.engine_args={sp_degree: 2}"],
            "engine.engine_args sets ['sp_degree']. SGLang's SD3 samples another image where its tokens are split.",
        ),
        (
            "worlds/shapes/vllm_omni",
            ["+engine.engine_args={step_execution: true, max_num_seqs: 4}"],
            "engine.engine_args sets ['step_execution', 'max_num_seqs'], which join requests between steps or before",
        ),
        (
            "hunyuan_video/t2v_grpo",
            ["parts/engine=sglang_diffusion", "+engine.engine_args={sp_degree: 2}"],
            "engine.engine_args sets ['sp_degree']. SGLang's HunyuanVideo samples another video where its tokens are",
        ),
        (
            "hunyuan_video/i2v_nft",
            ["parts/engine=sglang_diffusion", "+sync.canary_image_size=64"],
            "does not serve HunyuanVideoImageBundle: SGLang 0.5.23 makes HunyuanVideo's videos of text alone (runtime/",
        ),
        (
            "flux2_dev/grpo",
            ["parts/engine=sglang_diffusion"],
            "SGLangDiffusionEngine does not serve Flux2DevBundle: its pipeline of FLUX.2 dev has not been compared",
        ),
        (
            "ltx23/t2v_flowgrpo",
            ["parts/engine=vllm_omni"],
            "VLLMOmniEngine does not serve LTX23Bundle: its LTX-2 has not been compared with LTX-2.3, and is given",
        ),
        *(
            (
                "minimax_h3/t2v_flowgrpo",
                [f"parts/engine={engine}"],
                "does not serve MiniMaxH3Bundle: no pipeline of MiniMax-H3 with its two schedules has been compared",
            )
            for engine in ("vllm_omni", "sglang_diffusion")
        ),
        (
            "anyflow/cmgrpo",
            ["parts/engine=vllm_omni"],
            "VLLMOmniEngine does not serve AnyFlowFARBundle: AnyFlow FAR makes a video chunk by chunk",
        ),
        (
            "anyflow/cmgrpo",
            ["parts/engine=sglang_diffusion"],
            "SGLangDiffusionEngine does not serve AnyFlowFARBundle: AnyFlow FAR makes a video chunk by chunk",
        ),
        (
            "flux2_dev/grpo",
            ["parts/engine=vllm_omni"],
            "VLLMOmniEngine does not serve Flux2DevBundle: its pipeline of FLUX.2 dev has not been compared",
        ),
        (
            VLLM,
            [SGLANG, *REMOTE, "engine.engine_args=null"],
            "engine.url = http://10.0.0.1:30000 is another host, and engine.transfer_dir = /dev/shm is memory of this",
        ),
        (
            VLLM,
            [SGLANG, *REMOTE, "engine.engine_args=null", "+engine.num_instances=2"],
            "engine.num_instances = 2, but engine.url names one server that runs already. Set one of them alone.",
        ),
        (
            VLLM,
            [SGLANG, *REMOTE, "engine.engine_args=null", "+engine.num_devices=2", "+engine.gpus=[0,1]"],
            "engine.num_devices = 2, engine.gpus = [0, 1]: does nothing for the server that runs already, at",
        ),
        (
            VLLM,
            [SGLANG, "+engine.url=http://10.0.0.1:30000", "num_devices=8"],
            "engine.url = http://10.0.0.1:30000 is one server, to which each of 8 workers would push. Give the engine",
        ),
        (SHAPES, ["+residency.sleep_engine=true"], "residency.sleep_engine: true does nothing with device: cpu"),
        (
            SHAPES,
            ["device=cuda", "+residency.sleep_engine=true"],
            "residency.sleep_engine: true, but TrainsideRolloutEngine frees nothing when it sleeps. Remove it.",
        ),
        (
            SHAPES,
            ["device=cuda", "+residency.offload_weights=true"],
            "residency.offload_weights: true, but TrainsideRolloutEngine samples with the model that trains",
        ),
        (
            SHAPES,
            ["+bundle.vae_tile_pixels=32"],
            "bundle.vae_tile_pixels = 32 cuts nothing of 32 x 32 pixels. Set it below 32, or null.",
        ),
        (
            "ltx2/t2v_flowgrpo",
            ["+bundle.vae_tile_pixels=128", "sampling.height=512", "sampling.width=800"],
            "bundle.vae_tile_pixels = 128 leaves a last tile of 32 of 512 pixels, too narrow for a decoder. Set it to",
        ),
        (
            "hunyuan_video15/i2v_nft",
            ["+bundle.vae_tile_frames=10", "sampling.num_frames=33"],
            "bundle.vae_tile_frames = 10 is not 4 k + 1 with k of 2 or more. The nearest that is: 9.",
        ),
        (
            "ltx2/t2v_flowgrpo",
            ["+bundle.vae_tile_frames=33"],
            "bundle.vae_tile_frames = 33 cuts nothing of 25 frames. Set it below, or null.",
        ),
        (
            SHAPES,
            ["+bundle.vae_tile_frames=9"],
            "bundle.vae_tile_frames = 9 means nothing to a family of images, or of videos whose VAE works a few frames",
        ),
        (
            SHAPES,
            ["+bundle.attention_backend=flash"],
            "bundle.attention_backend = flash changes nothing: the model of SD3Bundle in diffusers calls torch's",
        ),
        (
            "wan21/t2v_mixgrpo",
            [
                "+bundle.attention_backend=flash",
                "+backend.topology._target_=unirl.train.configs.TrainTopology",
                "+backend.topology.sp=2",
            ],
            "bundle.attention_backend = flash computes attention of whole samples, and topology.sp = 2 spreads",
        ),
        (
            SHAPES,
            [
                "reward.scorers.shapes=null",
                "+reward.scorers.own._target_=unirl.reward.function.FunctionRewardScorer",
                "+reward.scorers.own.function=unirl.reward.worlds.shapes_latents.smoothness",
                "+engine.decode=false",
                "save.best_metric=reward",
            ],
            "engine.decode: false leaves no pixels to score, which reward.scorers.own (FunctionRewardScorer) needs.",
        ),
        (
            SHAPES,
            ["+engine.decode=false"],
            "engine.decode: false leaves no pixels to score, which reward.scorers.shapes (ShapesRewardScorer) needs.",
        ),
        (
            VLLM,
            ["engine.sleep_level=0"],
            "with engine.sleep_level = 0 VLLMRolloutEngine frees nothing when it sleeps. Set engine.sleep_level.",
        ),
        (
            VLLM,
            ["residency.sleep_engine=false"],
            "engine.sleep_level = 1 does nothing while the engine never sleeps. Set residency.sleep_engine: true.",
        ),
        (
            VLLM,
            [SGLANG, "residency=null"],
            "engine.sleep_level = 2 does nothing while the engine never sleeps",
        ),
        (
            "sd3/sglang",
            ["+backend.lora.base=nf4"],
            "backend.lora.base: nf4 quantises the model that trains, and engine (SGLangDiffusionEngine) samples",
        ),
        (
            "sd3/grpo",
            ["+backend.lora.base=nf4", "backend._target_=unirl.train.backend.veomni.VeOmniBackend"],
            "backend.lora.base: nf4 is not for VeOmniBackend. Take unirl.train.backend.fsdp.FSDPBackend",
        ),
        (
            VLLM,
            ["+backend.fsdp.cpu_offload=true"],
            "residency.offload_optimizer: true does nothing with backend.fsdp.cpu_offload, which keeps them in",
        ),
        (
            VLLM,
            ["+placement.train=0-15", "+placement.rollout=16-31"],
            "residency.sleep_engine: true frees memory that no other group needs: placement.rollout = ",
        ),
        (
            "vlm/qwen3_omni_thinker_gspo",
            ["parts/engine=text_sglang", "parts/layout=colocated"],
            "SGLangRolloutEngine does not serve Qwen3OmniThinkerBundle: it is given no sounds, and its Qwen3-Omni has",
        ),
        (
            LINEAR,
            ["device=cpu", "engine.dtype=fp32"],
            "dtype = fp32, but on a CPU vLLM computes the linear attention of Qwen35VLBundle in bf16 alone.",
        ),
        (LINEAR, ["device=cpu"], "vLLM keeps no prefixes of linear attention. Set engine.engine_args.enable_prefix"),
        (
            LINEAR,
            ["device=cpu", SGLANG],
            "SGLangRolloutEngine does not serve Qwen35VLBundle on a CPU: SGLang 0.5.23 computes linear attention by",
        ),
        (VLLM, [LORA_SYNC], "LoraWeightSync pushes LoRA adapters, but backend.lora is null"),
        (
            VLLM,
            [LORA_SYNC, "parts/train=lora", "+engine.max_lora_rank=64", "engine.dtype=fp32"],
            "engine.dtype = fp32 with engine.max_lora_rank = 64, but vLLM's adapters on a GPU need bf16 or fp16.",
        ),
        (
            VLLM,
            [LORA_SYNC, "parts/train=lora"],
            "LoraWeightSync pushes adapters, but engine.max_lora_rank = null. Set engine.max_lora_rank to the",
        ),
        (
            "flux1/fill_pickscore",
            ["parts/engine=vllm_omni", "parts/sync=lora", "+sync.canary_image_size=64"],
            "FluxFillBundle fills a hole, which a mask says. Set sync.canary_mask: true.",
        ),
        (
            "flux1/kontext_editreward",
            ["parts/engine=vllm_omni", "parts/sync=lora", "+sync.canary_image_size=64", "+sync.canary_mask=true"],
            "FluxKontextBundle reads no mask. Set sync.canary_mask: false.",
        ),
        (
            "wan22/animate",
            ["parts/engine=vllm_omni", "parts/sync=lora"],
            "the recipe has WanAnimateBundle. Set engine._target_: ",
        ),
        (
            VLLM,
            ["+engine.max_lora_rank=16"],
            "FullWeightSync pushes whole weights, but engine.max_lora_rank = 16. Set engine.max_lora_rank: null",
        ),
        (
            REPLICA,
            ["+sync.transport=ipc"],
            "sync.transport = ipc does nothing: ReplicaRolloutEngine is with what trains. Remove it",
        ),
        (
            "sd3/grpo",
            ["parts/engine=sglang_diffusion", "parts/layout=colocated", "sync.transport=ipc"],
            "sync.transport = ipc does nothing: SGLangDiffusionEngine is with what trains. Remove it",
        ),
        (
            "sd3/grpo",
            ["parts/engine=vllm_omni", "parts/sync=lora", "parts/layout=colocated", "sync.transport=ipc"],
            "sync.transport = ipc does nothing: adapters are small files. Remove it, or push whole weights",
        ),
        (
            "worlds/shapes/vllm_omni",
            ["sync.transport=ipc", "sync.changed=tensors"],
            "sync.transport = ipc keeps no earlier push, sync.changed = tensors needs one. Remove one of them.",
        ),
        (
            "worlds/shapes/vllm_omni",
            ["sync.transport=ipc", "engine.num_instances=2"],
            "ipc shares memory with one process, engine.num_instances = 2. Set it to 1, or remove ipc.",
        ),
        (
            REPLICA,
            ["cluster.transport=rdt"],
            "cluster.transport = rdt does nothing with runtime: local. Set runtime: ray, or remove it.",
        ),
        (
            REPLICA,
            [*APART, "+cluster.transfer_queue.backend.storage_backend=MooncakeStore"],
            "cluster.transfer_queue does nothing with cluster.transport = ray. Set transfer_queue, or remove it.",
        ),
        (
            REPLICA,
            ["+sync.transfer_dir=/dev/shm"],
            "sync.transfer_dir does nothing with transport = ray. Set files, or remove it.",
        ),
        (
            REPLICA,
            [*APART, "num_devices=4", "+cluster.num_nodes=2", "+sync.transport=ipc"],
            "sync.transport = ipc shares memory of one node, cluster.num_nodes = 2. Set nccl or ray.",
        ),
        (
            REPLICA,
            [*APART[:2], "device=cuda", "+placement.train=0-1", "+placement.rollout=1", "+sync.transport=nccl"],
            "sync.transport = nccl needs separate GPUs for each side, but devices [1] are shared. Set ipc",
        ),
    ],
)
def test_what_an_engine_cannot_use_is_refused(name, overrides, message):
    assert any(message in found for found in findings(name, *overrides)), findings(name, *overrides)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (VLLM, []),
        (VLLM, ["+sync.changed=elements"]),
        (VLLM, [SGLANG]),
        (VLLM, [LORA_SYNC, "parts/train=lora", "+engine.max_lora_rank=64"]),
        (REPLICA, ["device=cuda", "+residency.sleep_engine=true", "+residency.offload_weights=true"]),
        (REPLICA, [LORA_SYNC, "parts/train=lora"]),
        (VLLM, ["+placement.train=0-31", "+placement.rollout=16-31"]),
        ("worlds/shapes/nft", ["device=cuda", "+residency.offload_optimizer=true"]),
        (REPLICA, [*APART, "+sync.transport=ipc", "+sync.changed=tensors"]),
        (REPLICA, [*APART, "+sync.transport=files", "+sync.transfer_dir=/dev/shm"]),
        (
            "flux1/fill_pickscore",
            ["parts/engine=vllm_omni", "parts/sync=lora", "+sync.canary_image_size=64", "+sync.canary_mask=true"],
        ),
        (
            "wan21/i2v",
            [
                "parts/engine=vllm_omni",
                "parts/sync=lora",
                "+sync.canary_image_size=64",
                "eval.post_solver=euler",
            ],
        ),
    ],
)
def test_what_moves_and_fits_passes(name, overrides):
    assert findings(name, *overrides) == []


CORRECTED = [
    "+algorithm.rollout_correction._target_=unirl.algorithms.rollout_correction.RolloutCorrection",
    "+algorithm.rollout_correction.upper=1.001",
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "DiffusionGRPO replays denoising steps, but Closed returns no latents"),
        (["algorithm.old_logp_source=rollout"], "old_logp_source = rollout, but Closed returns no log-probs"),
        (CORRECTED, "algorithm.rollout_correction compares a replay with the rollout, but Closed returns no log-probs"),
        (["algorithm.old_logp_source=log-linear"], "old_logp_source = log-linear, but Closed returns no log-probs"),
        (["+sampling.init_same_noise=true"], "sampling.init_same_noise: true, but Closed draws its own noise"),
        (["+sampling.sde_indices=[1]"], "Closed makes every step stochastic or none, but sampling.sde_indices is set"),
    ],
)
def test_an_engine_of_ones_own_says_what_it_cannot_do(tmp_path, monkeypatch, overrides, message):
    (tmp_path / "closed_engine.py").write_text(OWN_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    engine = ["engine._target_=closed_engine.Closed", "~engine.forward_batch_size"]
    assert any(message in found for found in findings(SHAPES, *engine, *overrides))


EDITS = "qwen_image_edit.bundle.QwenImageEditBundle"
MACHINE = Machine(num_cpus=8, num_gpus=0)


@pytest.mark.parametrize("key", ["data.path", "eval.prompts"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (SHAPES, "{key} = {file}: 2 rows (a, b) bring images, but bundle SD3Bundle has none of them reach the model"),
        (
            "worlds/arithmetic/grpo",
            "{key} = {file}: 2 rows (a, b) bring images, but bundle Qwen3Bundle has none of them",
        ),
    ],
)
def test_images_of_the_data_that_no_model_would_read_are_refused_by_name(tmp_path, name, key, message):
    Image.new("RGB", (4, 4)).save(tmp_path / "cat.png")
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "repaint it", "prompt_id": each, "images": ["cat.png"], "answer": "1"} for each in "ab"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    register_resolvers()
    run = run_of(resolve(compose(name, [f"{key}={file}"])))
    found = list(machine_findings(run, Machine(num_cpus=8, num_gpus=0)))
    assert any(message.format(key=key, file=file) in each for each in found), found


@pytest.mark.parametrize("engine", ["text_vllm", "text_sglang"])
@pytest.mark.parametrize(
    ("config", "is_refused"),
    [({"model_type": "qwen3_5", "vision_config": {}}, True), ({"model_type": "qwen3_5_text"}, False), (None, True)],
)
def test_a_language_model_is_not_pushed_into_a_folder_with_its_vision_tower(tmp_path, engine, config, is_refused):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = "Qwen/Qwen3.5-9B" if config is None else tmp_path
    words = [f"parts/engine={engine}", f"bundle.pretrained_model={model}"]
    words += [f"{part}._target_=unirl.models.qwen3_5.{part}.Qwen35{part.title()}" for part in ("bundle", "pipeline")]
    found = list(machine_findings(run_of(resolve(compose(LINEAR, words))), Machine(num_cpus=8, num_gpus=32)))
    message = f"loads {model} with its vision tower, and what Qwen35Bundle trains has other names there. Set bundle"
    assert any(message in each for each in found) is is_refused, found


@pytest.mark.parametrize(("bundle", "is_refused"), [("sd3.controlnet.SD3ControlNetBundle", True), (EDITS, False)])
def test_an_engine_takes_the_images_of_the_models_that_it_names(tmp_path, bundle, is_refused):
    Image.new("RGB", (4, 4)).save(tmp_path / "cat.png")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "repaint it", "prompt_id": "a", "images": ["cat.png"]}) + "\n")
    register_resolvers()
    words = [f"data.path={file}", f"bundle._target_=unirl.models.{bundle}"]
    found = list(machine_findings(run_of(resolve(compose("worlds/shapes/vllm_omni", words))), MACHINE))
    said = f"data.path = {file}: 1 rows (a) bring images, but engine VLLMOmniEngine has none of them reach the model"
    assert any(said in each for each in found) is is_refused, found


def test_vllm_is_given_a_whole_qwen3_omni(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_omni_moe_thinker"}')
    register_resolvers()
    words = ["parts/engine=text_vllm", "parts/layout=colocated", f"engine.model={tmp_path}"]
    found = list(machine_findings(run_of(resolve(compose("vlm/qwen3_omni_thinker_gspo", words))), MACHINE))
    message = f"engine.model = {tmp_path} is the Thinker of a Qwen3-Omni alone, vLLM loads a whole Qwen3-Omni"
    assert any(message in each for each in found), found


def test_rows_without_the_image_that_a_model_begins_with_are_refused_by_name(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "it runs", "prompt_id": "a"}, {"prompt": "it sits", "prompt_id": "b"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    register_resolvers()
    run = run_of(resolve(compose("wan21/i2v", [f"data.path={file}"])))
    found = list(machine_findings(run, Machine(num_cpus=8, num_gpus=8)))
    message = f"data.path = {file}: 2 rows (a, b) bring no image, which bundle WanImageBundle begins with"
    assert any(message in each for each in found), found


def test_rows_with_more_images_than_a_model_takes_are_refused_by_name(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "cat.png")
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "join them", "prompt_id": str(count), "images": ["cat.png"] * count} for count in (4, 5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    register_resolvers()
    run = run_of(resolve(compose("flux2_klein/editreward", [f"data.path={file}"])))
    found = list(machine_findings(run, Machine(num_cpus=8, num_gpus=8)))
    message = f"data.path = {file}: 1 rows (5) bring more than the 4 images that bundle Flux2KleinBundle takes"
    assert any(message in each for each in found), found


def test_the_sizes_of_a_video_recipe_are_checked_without_weights():
    for override, message in (
        ("sampling.num_frames=6", "sampling.num_frames = 6 is not 4 k + 1. Set sampling.num_frames: 5 or 9"),
        ("sampling.height=700", "sampling.height = 700 is not divisible by 16"),
    ):
        assert any(message in found for found in findings("wan22/t2v_14b", override)), override


def test_a_server_over_several_hosts_needs_no_gpu_of_this_one():
    shared = [*REMOTE, "engine.engine_args=null", "+engine.transfer_dir=/mnt/shared"]
    assert findings(VLLM, SGLANG, *shared) == []
    run = run_of(resolve(compose(VLLM, [SGLANG, *shared])))
    assert not any(
        "GPU" in found for found in machine_findings(run, Machine(num_cpus=8, num_gpus=1)) if "engine" in found
    )


@pytest.mark.parametrize("name", ["worlds/questions/vllm", "worlds/arithmetic/sglang"])
def test_a_model_is_split_over_devices_that_divide_its_heads(name):
    register_resolvers()
    python = f"engine.python={sys.executable}"

    def found(size, *overrides):
        recipe = resolve(compose(name, [f"+engine.num_devices={size}", python, *overrides]))
        return list(machine_findings(run_of(recipe), Machine(num_cpus=8, num_gpus=1)))

    assert found(2) == []
    first, *_ = found(3)
    assert "engine.num_devices = 3 does not divide num_attention_heads = " in first
    assert "config.json. Set it to one of 1, 2" in first
    (message,) = found(2, "device=cuda")
    assert message == "engine.num_devices = 2, but this machine has 1 GPU. Lower it."
    if "vllm" in name:
        (message,) = found(2, "device=cuda", "+engine.num_instances=2", "+engine.gpus=[0,1,2,3]")
        of_both = "engine.num_instances * engine.num_devices = 2 * 2 = 4"
        assert message == f"{of_both}, but this machine has 1 GPU. Lower it."


# Keywords with another name than before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (VLLM, ["+engine.tensor_parallel_size=2"], {"num_devices": 2}),
        (VLLM, [SGLANG, "~engine.engine_args", "+engine.server_args={a: 1}"], {"engine_args": {"a": 1}}),
        (VLLM, [SGLANG, "~engine.sleep_level", "+engine.uses_memory_saver=true"], {"sleep_level": 2}),
        ("worlds/shapes/sglang", ["+engine.num_gpus=2"], {"num_devices": 2}),
    ],
)
def test_old_keywords_of_engines_are_taken_with_a_message(caplog, name, old, new):
    register_resolvers()
    run = check_recipe(resolve(compose(name, [*old, "runtime=local", "num_devices=1"])))
    assert {key: run.engine.get(key) for key in new} == new
    assert all(f"is called engine.{key} now" in caplog.text for key in new)


def test_an_old_keyword_beside_its_new_one_is_refused():
    register_resolvers()
    both = compose(VLLM, [SGLANG, "+engine.server_args={a: 1}"])
    with pytest.raises(ConfigError, match="engine.server_args is the old name of engine.engine_args, and both are set"):
        resolve(both)
    both = compose(REPLICA, ["+sync.only_changed=true", "+sync.changed=tensors"])
    with pytest.raises(ConfigError, match="sync.only_changed is the old name of sync.changed, and both are set"):
        resolve(both)


def test_a_push_of_what_changed_may_have_its_old_name(caplog):
    register_resolvers()
    for old, new in (("true", "tensors"), ("false", "all")):
        run = check_recipe(resolve(compose(REPLICA, [f"+sync.only_changed={old}", "runtime=local", "num_devices=1"])))
        assert run.policy.sync is not None and run.policy.sync.get("changed") == new
    assert "sync.only_changed is called sync.changed now" in caplog.text
