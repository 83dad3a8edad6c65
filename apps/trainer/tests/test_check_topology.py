"""Rules about how the devices that train divide."""

import json

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import run_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of

SHAPES, REPLICA, TEXTS = "worlds/shapes/flowgrpo", "worlds/shapes/replica", "worlds/arithmetic/grpo"
FOUR = ["runtime=ray", "num_devices=4"]
LINEAR = "bundle._target_=unirl.models.qwen3_5.bundle.Qwen35Bundle"
EXPERTS = "bundle._target_=unirl.models.qwen3.bundle.Qwen3MoeBundle"
IMAGES, DRAWS = "worlds/questions/grpo", "sana/flowgrpo"
CLASS = "+backend.topology._target_=unirl.train.configs.TrainTopology"


def findings(name, *overrides):
    register_resolvers()
    return list(run_findings(run_of(resolve(compose(name, [*FOUR, *overrides])))))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (SHAPES, ["+backend.topology.sp=3"], "backend.topology.sp = 3 does not divide 4 devices. Change sp, or the"),
        (
            SHAPES,
            ["+backend.topology.sp=2", "+backend.topology.dp_shard=4"],
            "backend.topology.dp_replicate * dp_shard * sp = 1 * 4 * 2 = 8, but there are 4 devices. Set dp_shard: 2",
        ),
        (
            SHAPES,
            ["+backend.topology.sp=2", "batch_size=3", "sampling.samples_per_prompt=3"],
            "3 * 3 = 9 is not divisible by the 2 groups of topology.sp = 2 devices. Change one of: batch_size, ",
        ),
        (
            SHAPES,
            ["+backend.topology.sp=2", "+backend.fsdp.compile=true"],
            "backend.topology.sp = 2 exchanges tokens inside blocks that backend.fsdp.compile compiles",
        ),
        (
            SHAPES,
            ["+backend.topology.sp=4", "+backend.topology.ring=3"],
            "backend.topology.ring = 3 does not divide sp = 4, whose ranks it groups. Set it to one of [1, 2, 4].",
        ),
        (SHAPES, ["+backend.topology.ring=2"], "topology.ring = 2 does not divide sp = 1, whose ranks it groups"),
        (REPLICA, ["+backend.topology.sp=2"], "engine samples with a copy of the model on every device that trains"),
        (
            DRAWS,
            ["+backend.topology.sp=2"],
            "but the tokens of SanaBundle cannot be spread over ranks. Set it to 1.",
        ),
        (
            TEXTS,
            ["+backend.topology.sp=2", "+pipeline.packed=false"],
            "topology.sp = 2 spreads packed rows, and pipeline.packed: false pads them. Set it to null, or sp: 1.",
        ),
        (TEXTS, ["+backend.topology.ep=3"], "backend.topology.ep = 3 does not divide the 4 devices. Change ep, or the"),
        (
            TEXTS,
            ["+backend.topology.ep=2"],
            "ep = 2, but Qwen3Bundle has no experts that can be spread over ranks.",
        ),
        (
            TEXTS,
            [EXPERTS, "+backend.topology.ep=2", "+backend.fsdp.compile=true"],
            "backend.topology.ep = 2 exchanges tokens inside blocks that backend.fsdp.compile compiles. Set ep: 1, or",
        ),
        (
            TEXTS,
            [
                EXPERTS,
                "+backend.lora={_target_: unirl.train.configs.LoraConfig, rank: 2, alpha: 4, "
                "target_modules: [q_proj, mlp.experts]}",
            ],
            "backend.lora.target_modules ['mlp.experts'] are experts of Qwen3MoeBundle, whose weights are stacks",
        ),
        (
            TEXTS,
            ["+backend.topology.tp=2", "+backend.topology.sp=2"],
            "backend.topology.tp = 2 with sp = 2: the two are not proven together. Set one of them to 1.",
        ),
        (
            TEXTS,
            ["+backend.topology.tp=2", "+backend.topology.dp_shard=4"],
            "dp_replicate * dp_shard * tp = 1 * 4 * 2 = 8, but there are 4 devices. Set dp_shard: 2, or -1.",
        ),
        (SHAPES, ["+backend.topology.tp=2"], "backend.topology.tp = 2: the layers of "),
        (IMAGES, ["+backend.topology.tp=2"], "tp = 2: the layers of QwenVLBundle cannot be divided among ranks."),
        (TEXTS, [EXPERTS, "+backend.topology.tp=2"], "the layers of Qwen3MoeBundle cannot be divided among ranks."),
        (
            TEXTS,
            [LINEAR, "+backend.topology.tp=2"],
            "the layers of Qwen35Bundle cannot be divided among ranks: its linear attention carries a state and",
        ),
        (
            TEXTS,
            [LINEAR, "+backend.topology.sp=2"],
            "the tokens of Qwen35Bundle cannot be spread over ranks: its linear attention carries a state and",
        ),
        (
            TEXTS,
            ["+backend.topology.tp=2", "+backend.fsdp.compile=true"],
            "backend.topology.tp = 2 is not proven with backend.fsdp.compile = True. Remove one of them.",
        ),
        (
            TEXTS,
            ["+backend.topology.tp=2", "+backend.optimizer.states=8bit"],
            "backend.topology.tp = 2 is not proven with backend.optimizer.states = 8bit. Remove one of them.",
        ),
        (
            TEXTS,
            ["+backend.topology.tp=2", "backend._target_=unirl.train.backend.veomni.VeOmniBackend"],
            "backend.topology.tp = 2 is not for VeOmniBackend, whose plan does not divide layers. Take unirl.train.",
        ),
        (
            TEXTS,
            ["+backend.topology.tp=2", "+pipeline.packed=false"],
            "backend.topology.tp = 2 is proven with packed rows, and pipeline.packed: false pads them. Set it to null.",
        ),
        (
            TEXTS,
            ["+backend.topology.tp=2", "batch_size=3", "sampling.samples_per_prompt=3"],
            "3 * 3 = 9 is not divisible by the 2 groups of topology.tp = 2 devices. Change one of: batch_size, ",
        ),
    ],
)
def test_axes_that_cannot_be_are_found_before_a_run(name, overrides, message):
    found = findings(name, CLASS, *overrides)
    assert any(message in each for each in found), found


def test_ranks_that_share_samples_need_no_more_of_a_recipe():
    assert findings(SHAPES, CLASS, "+backend.topology.sp=2") == []
    assert findings(TEXTS, CLASS, "+backend.topology.sp=2") == []
    assert findings(IMAGES, CLASS, "+backend.topology.sp=2") == []
    assert findings(TEXTS, CLASS, EXPERTS, "+backend.topology.sp=2", "+backend.topology.ep=2") == []
    assert findings(TEXTS, CLASS, "+backend.topology.tp=2") == []
    # Five samples per device would not do; of two shards each has ten.
    few = ["batch_size=4", "sampling.samples_per_prompt=5", "stack.num_updates_per_batch=2"]
    assert findings(SHAPES, CLASS, "+backend.topology.sp=2", *few) == []
    assert any("is 5 samples a device" in each for each in findings(SHAPES, CLASS, *few))


def test_a_topology_names_its_class():
    found = findings(SHAPES, "+backend.topology.sp=2")
    assert found == ["backend.topology has no _target_. Add _target_: unirl.train.configs.TrainTopology."]


def test_ranks_divide_the_heads_of_a_checkpoint_on_this_machine(tmp_path):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"num_attention_heads": 6}))
    found = findings(SHAPES, CLASS, "+backend.topology.sp=4", f"bundle.pretrained_model={tmp_path}")
    message = f"backend.topology.sp = 4 does not divide the 6 attention heads of {tmp_path}/transformer/config.json. "
    advice = "Set it to one of [1, 2, 3, 6]. Or let keys go around the ranks instead, with topology.ring."
    assert any(message + advice in each for each in found), found
    given = (SHAPES, CLASS, "+backend.topology.sp=4", f"bundle.pretrained_model={tmp_path}")
    # Heads are exchanged by two ranks, and by none.
    for ring in (2, 4):
        assert findings(*given, f"+backend.topology.ring={ring}") == []


def test_a_ring_needs_a_device_whose_attention_gives_its_sums():
    found = findings(SHAPES, CLASS, "+backend.topology.sp=2", "+backend.topology.ring=2", "device=npu")
    message = "has no attention that gives its sums, by which the blocks of topology.ring add up. Set topology.ring: 1"
    assert any(message in each for each in found), found
    assert not any("topology.ring" in each for each in findings(SHAPES, CLASS, "+backend.topology.sp=2", "device=npu"))


def test_ranks_divide_the_heads_of_a_language_model_on_this_machine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12, "num_key_value_heads": 6}))
    given = (TEXTS, CLASS, f"bundle.pretrained_model={tmp_path}")
    assert findings(*given, "+backend.topology.sp=2") == []
    found = findings(*given, "+backend.topology.sp=4")
    message = (
        f"backend.topology.sp = 4 neither divides the 6 heads of keys and values of {tmp_path}/config.json nor is "
    )
    assert any(message + "a multiple of them. Set it to one of [1, 2, 3, 6, 12]." in each for each in found), found


def test_ranks_divide_the_layers_of_a_language_model_on_this_machine(tmp_path):
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    given = (TEXTS, CLASS, f"bundle.pretrained_model={tmp_path}")
    assert findings(*given, "+backend.topology.tp=2") == []
    message = f"topology.tp = 4 does not divide the 6 heads of keys and values of {tmp_path}/config.json. Set it to one"
    assert any(f"{message} of [1, 2, 3, 6]." in each for each in findings(*given, "+backend.topology.tp=4"))


def test_ranks_divide_the_experts_of_a_checkpoint_on_this_machine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"thinker_config": {"text_config": {"num_experts": 6}}}))
    given = (EXPERTS, CLASS, f"bundle.pretrained_model={tmp_path}")
    assert findings(TEXTS, *given, "+backend.topology.ep=2") == []
    message = f"backend.topology.ep = 4 does not divide the 6 experts of {tmp_path}/config.json. Set it to one of "
    assert any(message in each for each in findings(TEXTS, *given, "+backend.topology.ep=4"))
