"""A release's folder without weights: its index, the configurations of its models, and tokenizers of bytes that stand
for the real ones."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.models.extras import from_extra
from unirl.models.releases.configurations import settings_of
from unirl.models.releases.contrastive import CLIP_MODELS
from unirl.models.releases.indexes import INDEXES, index_of, write_index
from unirl.models.releases.language import LANGUAGE_MODELS, LanguageModel
from unirl.models.releases.unified import UNIFIED_MODELS
from unirl.models.tiny.text import byte_tokenizer
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    import diffusers
    import transformers
    from diffusers.pipelines import ltx2

ALIASES: Mapping[str, str] = {
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
    "./models/sd3-controlnet-canny": "InstantX/SD3-Controlnet-Canny",
    "black-forest-labs/FLUX.2-klein-4B": "black-forest-labs/FLUX.2-klein-base-4B",  # distilled from it
}
"""Names in recipes -> releases with the same models."""
LIBRARIES: Mapping[str, Any] = {"diffusers": diffusers, "transformers": transformers, "ltx2": ltx2}
SPECIAL = ("<pad>", "<s>", "</s>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<unk>") + (
    "<|audio_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<image>",
)
"""Ids before those of bytes, in the order that `configurations` takes them for granted."""
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: "  # an empty prompt has tokens too
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
PROMPT_TOKENS = 4096
"""Longest text of a stand-in tokenizer whose family says no limit."""

PLAIN = str | int | float | list | tuple | None
"""Values that JSON has."""

Settings = dict[str, Any]  # Any: JSON values


def is_known(hub_id: str) -> bool:
    """True if the configurations of this release are known."""
    return ALIASES.get(hub_id, hub_id) in INDEXES or hub_id in {*LANGUAGE_MODELS, *UNIFIED_MODELS, *CLIP_MODELS}


def write_configurations(hub_id: str, folder: Path) -> None:
    """The folder that a download of a release gives, with no weights and without its tokenizers' words.

    Raises ConfigError for a release whose configurations are not known.
    """
    if hub_id in UNIFIED_MODELS:
        folder.mkdir(parents=True, exist_ok=True)
        UNIFIED_MODELS[hub_id](folder)
        return
    if hub_id in LANGUAGE_MODELS:
        _write_language_model(LANGUAGE_MODELS[hub_id], folder)
        return
    if hub_id in CLIP_MODELS:
        transformers.CLIPConfig(**CLIP_MODELS[hub_id]).save_pretrained(folder)
        _tokenizer("CLIPTokenizer").save_pretrained(folder)
        transformers.CLIPImageProcessorPil().save_pretrained(folder)
        return
    release = ALIASES.get(hub_id, hub_id)
    if release not in INDEXES:
        raise ConfigError(
            f"the configurations of {hub_id} are not known. Give a folder with its *.json and tokenizer files "
            f"(`hf download {hub_id} --include '*.json' '*.txt' '*.model' --local-dir FOLDER`), or one of "
            f"{', '.join(sorted({*INDEXES, *ALIASES, *LANGUAGE_MODELS, *UNIFIED_MODELS, *CLIP_MODELS}))}."
        )
    index = index_of(release)
    folder.mkdir(parents=True, exist_ok=True)
    for name, entry in index.items():
        if not isinstance(entry, list) or entry[1] is None:
            continue
        place = folder / name
        place.mkdir(exist_ok=True)
        library, class_name = entry
        if "okenizer" in class_name or name.startswith("tokenizer"):  # or a processor with one
            _tokenizer(class_name).save_pretrained(place)
            index[name] = ["transformers", "PreTrainedTokenizerFast"]
        elif library == "transformers" and class_name.endswith("Processor"):
            _write_processor(class_name, settings_of(release, name, class_name), place)
        else:
            model_class = getattr(LIBRARIES[library], class_name)
            _write_configuration(model_class, settings_of(release, name, class_name), place)
    write_index(index, folder)


def _write_language_model(model: LanguageModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if model.config_class is None:  # one that transformers does not know
        (folder / "config.json").write_text(json.dumps(dict(model.settings), indent=2), encoding="utf-8")
    else:
        config = getattr(transformers, model.config_class)(**model.settings)
        config.architectures = [model.model_class]
        config.save_pretrained(folder)
    _tokenizer(model.model_class, length=None, image_words=model.image_words).save_pretrained(folder)
    if model.sees:
        processor = transformers.Qwen2VLImageProcessorPil(patch_size=model.patch_size)
        processor.save_pretrained(folder)
    if model.num_mel_bins is not None:
        path = folder / "preprocessor_config.json"
        hears = transformers.WhisperFeatureExtractor(feature_size=model.num_mel_bins).to_dict()
        path.write_text(json.dumps({**hears, **json.loads(path.read_text())}), encoding="utf-8")


def _write_configuration(model_class: Any, settings: Settings, place: Path) -> None:  # Any: of either library
    if hasattr(model_class, "config_class") and model_class.config_class is not None:
        config = model_class.config_class(**settings)
        config.save_pretrained(place)
        return
    defaults = inspect.signature(model_class.__init__).parameters.items()
    known = {key: value.default for key, value in defaults if isinstance(value.default, PLAIN)}
    file = model_class.config_name  # schedulers and guiders have other names than models
    content = {"_class_name": model_class.__name__, **known, **settings}
    (place / file).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _tokenizer(
    class_name: str, length: int | None = PROMPT_TOKENS, *, image_words: Mapping[str, str] | None = None
) -> Any:  # Any: of transformers
    """length: longest text, None for no limit; of CLIP always 77. image_words: special tokens by their names."""
    length = 77 if class_name.startswith("CLIP") else length
    return byte_tokenizer(
        {token: place for place, token in enumerate(SPECIAL)},
        **({} if length is None else {"model_max_length": length}),
        **({} if image_words is None else {"extra_special_tokens": dict(image_words)}),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=[*SPECIAL[3:7], *SPECIAL[8:]],
        chat_template=CHAT,
    )


def _write_processor(class_name: str, settings: Settings, place: Path) -> None:
    # Of images and texts together families read the part of images, which needs no torchvision.
    own = "Qwen2VLImageProcessorPil" if class_name == "Qwen2VLProcessor" else class_name
    getattr(transformers, own)(**settings).save_pretrained(place)
