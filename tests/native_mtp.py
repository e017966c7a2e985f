"""Tiny checkpoints with MTP modules of their own, written under the published names."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

import zoo
from hf_specdec import SpeculativeGenerationMixin


def tiny(name: str, num_modules: int) -> Any:
    """A tiny model of the zoo whose configuration tells of so many MTP modules."""
    fields = copy.deepcopy(zoo.build(name).config.to_dict())
    fields = {key: value for key, value in fields.items() if "nextn" not in key and "mtp" not in key}
    if name == "mellum":
        fields["layer_types"] = ["sliding_attention", "full_attention"] * 2
        del fields["rope_parameters"]
    torch.manual_seed(sum(map(ord, name)))
    config = CONFIG_MAPPING[name](**fields, num_nextn_predict_layers=num_modules)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # see zoo.build; what follows a token is mostly a matter of the token
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5 if "o_proj" in key or "down_proj" in key else 3)
        model.get_input_embeddings().weight.mul_(3)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def published_names(model: Any) -> list[str]:
    """Patterns of the MTP tensors in its checkpoint; transformers has them for models of the published depths."""
    first = model.config.num_hidden_layers
    if model.config.model_type == "mellum":
        return [r"^mtp\."]
    return [rf"model\.layers\.{first + index}\..*" for index in range(model.config.num_mtp_layers)]


def save(name: str, num_modules: int, folder: Path) -> None:
    """Write a tiny model with random MTP modules that look at the token, too: right now and then."""
    model = tiny(name, num_modules)
    model.save_pretrained(folder)
    modules: Any = MtpModel(model, num_modules)
    with torch.no_grad():  # it leaves experts and routers as they lie in memory
        for tensor in modules.layers.state_dict().values():
            tensor.copy_(torch.rand_like(tensor) * 0.4 + 0.8 if tensor.dim() == 1 else torch.randn_like(tensor) * 0.08)
        for layer in modules.layers:
            layer.eh_proj.weight[:, : model.config.hidden_size] += 3 * torch.eye(model.config.hidden_size)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in modules.layers.state_dict().items():
        tensors.update(_published(name, key, tensor, model.config.num_hidden_layers))
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip


def _published(name: str, key: str, tensor: Tensor, num_hidden_layers: int) -> dict[str, Tensor]:
    """A tensor of transformers' modules under its published names; experts are stored one by one."""
    index, rest = key.split(".", 1)
    if name == "mellum":
        own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
        part = rest.split(".")[0]
        prefix = f"mtp.layers.{index}." if part == "mtp_block" else "mtp."
        rest = rest.removeprefix("mtp_block.") if part == "mtp_block" else rest.replace(part, own[part])
    else:
        prefix = f"model.layers.{num_hidden_layers + int(index)}."
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    if rest.endswith("experts.gate_up_proj"):
        stem = prefix + re.sub(r"gate_up_proj$", "", rest)
        halves = [expert.chunk(2, dim=0) for expert in tensor]
        return {f"{stem}{i}.{part}_proj.weight": half for i, pair in enumerate(halves)
                for part, half in zip(("gate", "up"), pair, strict=True)}  # fmt: skip
    if rest.endswith("experts.down_proj"):
        stem = prefix + re.sub(r"down_proj$", "", rest)
        return {f"{stem}{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
    return {prefix + rest: tensor}


def loaded(folder: Path) -> Iterator[Any]:
    """The model as a user loads it; tiny models have other depths than those whose names transformers knows."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = published_names(model)
    yield SpeculativeGenerationMixin.attach(model)
