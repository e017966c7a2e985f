"""flashspec: n-gram lookup of `gamma` tokens. Settings: model, dtype, threads, eos_ids, gamma."""

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine.ngram import NgramDrafter
from flashspec.engine.verifier import TargetModel
from protocol import FirstToken, serve
from transformers import AutoModelForCausalLM


class TimedTarget(TargetModel):
    """Records the time at which the first step's tokens are decided."""

    def __init__(self, *arguments, first, **others):
        super().__init__(*arguments, **others)
        self._first = first

    def commit(self, *arguments, **others):
        self._first.seen()
        return super().commit(*arguments, **others)


def load(settings):
    torch.set_num_threads(settings["threads"])
    first, dtype = FirstToken(), getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
    target = TimedTarget(settings["model"], torch.device("cpu"), dtype, model=model, first=first)
    config = FlashSpecConfig(
        target_name=settings["model"], device="cpu", dtype=settings["dtype"], drafter_strategy="bandit", compile=False,
        eos_token_ids=tuple(settings["eos_ids"]), bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0, gamma=settings["gamma"]),
    )  # fmt: skip
    engine = SpeculativeEngine(config, [NgramDrafter()], target)

    def answer(prompt_ids, max_new_tokens):
        first.begin()
        result = engine.generate(torch.tensor([prompt_ids]), max_new_tokens=max_new_tokens)
        first.seen()  # a single step is not committed
        ids = [token for token in result.output_ids[0].tolist() if token >= 0]
        steps = [step.emitted for step in result.arm_steps]
        return ids, first.seconds, sum(steps) / len(steps) if steps else None

    return answer


if __name__ == "__main__":
    serve(load, ["flashspec", "torch", "transformers"])
