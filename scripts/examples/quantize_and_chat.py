"""Quantize a model to 2 bits, then write and chat with it. Needs no GPU; the demo model takes under a minute.

python scripts/examples/quantize_and_chat.py [MODEL] [OUT]
"""

import sys
import tempfile
from pathlib import Path

from trirun_cli import LLM, SamplingParams, quantize

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo-model"
# A model that was never trained on conversations has no chat template. This one turns them into a play.
TEMPLATE = """{% for message in messages %}"{{ message.content }}" said the {{ message.role }}.

{% endfor %}{% if add_generation_prompt %}"{% endif %}"""


def main() -> None:
    """Quantize, write a text, hold a short conversation."""
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()) / "model-2bit"

    # Little text, to be done soon; without samples and seqlen the preset takes its own, which gives a better model.
    report = quantize(model, out, preset="fast", samples=32, seqlen=128, overwrite=True)
    sizes = f"{report.bytes_before:,} → {report.bytes_after:,} bytes"
    print(f"{report.out}: {report.bits_per_weight:.3f} bits per weight, {sizes}")
    if report.held_out is not None:
        print(f"perplexity {report.held_out.original_perplexity:.2f} → {report.held_out.perplexity:.2f}")

    with LLM(out) as llm:
        prompts = ["The old house stood alone upon the hill, and", "The sea was"]
        for completion in llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9, seed=3)):
            print(repr(completion.text), completion.finish_reason)
        has_template = bool(llm.tokenizer.chat_template)

    if not has_template:
        (out / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(out) as llm:
        conversation = [{"role": "user", "content": "Who lives in this house?"}]
        (answer,) = llm.chat(conversation, SamplingParams(max_tokens=24, stop=('"',)))
        print(f"{llm.name} answers: {answer.text!r}")


if __name__ == "__main__":
    main()
