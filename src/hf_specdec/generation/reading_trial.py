"""Try an ambiguous head in each of its readings, and keep the one whose drafts the target accepts most often.

The target writes a few texts. On these, every reading drafts after every token, as the head would in generation. The
measure is the expected number of accepted tokens per draft with lossless sampling (https://arxiv.org/abs/2211.17192):
computing it needs far less text than counting accepted tokens. The result is stored on disk for each head and target.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from huggingface_hub import constants
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.atomic import write_text
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.trial_texts import TrialText, write_texts
from hf_specdec.heads.attention import AlignedAttention
from hf_specdec.heads.base import DraftHead
from hf_specdec.heads.readings import Reading
from hf_specdec.records import read_object
from hf_specdec.verification.features import Features, FeatureTap
from hf_specdec.verification.model import lm_head_rows, text_config

logger = logging.getLogger(__name__)

DRAFT_STEPS = 6
"""Tokens per draft; more than one, because `norm_output` changes drafts only from the second token on."""
MIN_GAIN = 0.05
"""Accepted tokens per draft that a reading must gain, on average, to replace the documented one.

Measured: readings of random heads differ by up to 0.043 in every text; a wrong layer costs a trained head 0.08."""
MIN_STANDARD_ERRORS = 2.0
"""The same in standard errors of the gain over the texts; smaller gains are noise."""
VERSION = 2
"""Part of the key of stored results; a new version repeats all trials."""
SAMPLED_VALUES = 64
"""Number of values read at each end of a tensor to identify it."""


@torch.no_grad()
def choose_reading(model: PreTrainedModel, head: Any, readings: Sequence[Reading]) -> Reading:
    """Return the reading with the most accepted tokens, or the first if no gain exceeds `MIN_GAIN` and the noise.

    Returns the stored result of an earlier trial if there is one, else logs and stores the result. Does not change the
    random state of the process.

    Args:
        model: The target, on its device.
        head: An EAGLE-3 head, bound to the target. A trial leaves it in the last reading that was tried.
        readings: Possible readings, the documented one first.
    """
    kept = _kept_file(model, head, readings)
    known = None if kept is None else _read(kept, readings)
    if known is not None:
        return known
    config, texts = text_config(model), write_texts(model)
    layers = set()
    for reading in readings:
        head.read_as(reading, config)
        layers.update(head.feature_layers)
    scores: dict[Reading, list[float]] = {reading: [] for reading in readings}
    for text in texts:
        with FeatureTap(model, sorted(layers)) as tap:
            logits = model(input_ids=text.token_ids).logits
        features = tap.take()
        for reading in readings:
            head.read_as(reading, config)
            scores[reading].append(_accepted_tokens(model, head, text, features, logits))
    lengths, better = {reading: fmean(each) for reading, each in scores.items()}, []
    for reading in readings[1:]:  # the same texts for all readings, so only the spread of differences is noise
        gains = [new - old for new, old in zip(scores[reading], scores[readings[0]], strict=True)]
        noise = stdev(gains) / math.sqrt(len(gains))
        if fmean(gains) > max(MIN_GAIN, MIN_STANDARD_ERRORS * noise):
            better.append(reading)
    best = max(better, key=lambda reading: lengths[reading], default=readings[0])
    figures = "; ".join(f"{reading}: {length:.2f}" for reading, length in lengths.items())
    logger.log(
        logging.INFO if best == readings[0] else logging.WARNING,
        "%s allows %d readings. Accepted tokens per draft of %d: %s. Chosen: %s. "
        "load_drafter(..., reading={...}) sets it.",
        head.name_or_path or type(head).__name__, len(readings), DRAFT_STEPS, figures, best,
    )  # fmt: skip
    if kept is not None:
        _write(kept, best, lengths)
    return best


def _accepted_tokens(model: PreTrainedModel, head: Any, text: TrialText, features: Features, logits: Tensor) -> float:
    """Return the expected number of accepted tokens of a draft, averaged over all its positions in the continuation.

    Args:
        model: The target.
        head: The head, in the reading to measure.
        text: A prompt and its continuation, T tokens together.
        features: The target's hidden states of all T tokens.
        logits: `[1, T, V]` of the target.
    """
    ids, device = head.hot_token_ids, head.device
    probs = logits.float().softmax(-1).to(device)
    probs = probs if ids is None else probs[:, :, ids]
    lm_head = lm_head_rows(model, ids) if head.shares_lm_head else None
    embeddings = head.embedding_for(model)(text.token_ids[:, 1:]).to(device, head.dtype)
    hidden = head.fuse(features.of(head.feature_layers)[:, :-1].to(device, head.dtype))
    attend = AlignedAttention(head.config.num_hidden_layers)
    positions = torch.arange(hidden.shape[1], device=device)[None]
    first = max(text.prompt_length - 2, 0)  # entry t reads token t + 1, predicts t + 2
    starts = hidden.shape[1] - DRAFT_STEPS + 1 - first
    reached, total = torch.ones(starts, dtype=torch.float32, device=device), 0.0
    for step in range(DRAFT_STEPS):
        output = head(embeddings, hidden, positions, attend)
        drafted = head.score(output, lm_head).float().softmax(-1)
        overlap = torch.minimum(drafted, probs[:, 1:]).sum(-1)[0, first:]
        reached = reached * overlap[step : step + starts]
        total += float(reached.mean())
        hidden = torch.cat([hidden[:, :1], output[:, :-1]], dim=1)
    return total


# ----------------------------------------------------------------------------------------------- kept results


def _kept_file(model: PreTrainedModel, head: DraftHead, readings: Sequence[Reading]) -> Path | None:
    """Return the file, which may not exist, of the result for this head, target and list of readings.

    None if the weights of head or target cannot be identified.
    """
    chosen = ("norm_output", "eagle_aux_hidden_state_layer_ids")  # set by `read_as`, so not part of the key
    fields = {name: value for name, value in head.config.to_dict().items() if name not in chosen}
    facts = [VERSION, [str(reading) for reading in readings], repr(head.ambiguity), fields]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(model.config.to_json_string(use_diff=False).encode())
    for module in (head, model):
        parts = list(_identity(module))
        if not parts:
            return None
        for part in parts:
            digest.update(part)
    return Path(constants.HF_HOME) / "hf-specdec" / "readings" / f"{digest.hexdigest()[:40]}.json"


def _identity(module: nn.Module) -> Iterator[bytes]:
    """Yield names, shapes, dtypes and some values of plain tensors, without quantised, sharded and offloaded ones."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            ends = torch.cat([flat[:SAMPLED_VALUES], flat[-SAMPLED_VALUES:]]).cpu()
            yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
            yield ends.view(torch.uint8).numpy().tobytes()


def _read(file: Path, readings: Sequence[Reading]) -> Reading | None:
    """Return the stored one of these readings; None if the file does not exist, is invalid or names another."""
    if not file.is_file():
        return None
    try:
        chosen = read_object(file).get("reading")
    except InvalidConfigError:
        return None
    return next((reading for reading in readings if str(reading) == chosen), None)


def _write(file: Path, best: Reading, lengths: dict[Reading, float]) -> None:
    content = {"reading": str(best), "accepted_tokens": {str(key): round(value, 4) for key, value in lengths.items()}}
    try:
        write_text(file, json.dumps(content, indent=1))
    except InvalidConfigError as error:
        logger.warning("The chosen reading is not kept for the next time: %s", error)
