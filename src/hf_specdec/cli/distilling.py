"""`hf-specdec distill`, also under `accelerate launch`: what can be refused is refused before the target is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_specdec.cli.options import Json, Model, Precision, Seed, finite, need_package, writable_directory
from hf_specdec.cli.runs import Output, target_of, tell, training_package
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import end_tokens, load_tokenizer


def distill(
    output: Output,
    prompts: Annotated[str | None, typer.Option(help="File of prompts, or a dataset's name.")] = None,
    invent: Annotated[int, typer.Option(min=0, help="Prompts that the model makes up, besides.")] = 0,
    model: Model = None,
    split: Annotated[str, typer.Option(help="Of a dataset.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts at most.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, callback=finite, help="Repeat for a mix; 0 is greedy.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="User turns; missing ones are invented.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer at most.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generate() call, or requests at once.")] = 32,
    server: Annotated[
        str | None, typer.Option(help="URL of a server (vLLM, SGLang) that answers; --model is its tokenizer then.")
    ] = None,
    server_model: Annotated[str | None, typer.Option(help="What that server calls the model.")] = None,
    unseeded: Annotated[
        bool, typer.Option("--unseeded", help="Send a server no seeds (vLLM on a CPU fails with some).")
    ] = False,
    seed: Seed = 0,
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Let a model answer prompts, and keep prompts and answers to train heads on."""
    if prompts is None and not invent:
        raise InvalidConfigError("There is nothing to answer.", "Give --prompts, or --invent N.")
    if server is None and (server_model is not None or unseeded):
        option = "--unseeded" if server_model is None else "--server-model"
        raise InvalidConfigError(f"{option} is for a server.", "Give --server URL, or leave it out.")
    need_package("datasets", "Distilling", "training")
    if server is not None:
        need_package("openai", "Distilling from a server", "training")
    writable_directory(output, "--output")
    training = training_package()
    asked = training.read_prompts(prompts, split=split, limit=limit) if prompts is not None else []
    config = training.DistillConfig(
        max_new_tokens=max_new_tokens, num_turns=turns, batch_size=batch_size, seed=seed,
        temperatures=tuple(temperature or training.DistillConfig().temperatures),
    )  # fmt: skip
    if server is None:
        target, tokenizer = target_of(model, dtype)
    else:
        tokenizer = load_tokenizer(model)
        target = training.ServerTeacher(
            server, tokenizer, server_model, num_requests=batch_size, seeded=not unseeded, end_ids=end_tokens(model)
        )
    training.distill(target, tokenizer, [*asked, *training.invented_prompts(invent)], output, config)
    talks = training.read_conversations(output)
    answered = sum(sum(talk.loss_mask) for talk in talks)
    result = {"output": str(output), "conversations": len(talks), "answer_tokens": answered}
    tell(result if server is None else {**result, "given_up": dict(target.lost)}, as_json)
