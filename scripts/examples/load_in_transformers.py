"""A packed checkpoint as an ordinary transformers model: its layers run on trirun's kernels.

python scripts/examples/load_in_transformers.py CHECKPOINT
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trirun_cli.integrations.transformers  # noqa: F401 (registers the format)


def main() -> None:
    """Load the checkpoint of the command line, and continue a prompt greedily."""
    path = sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    print(next(module for module in model.modules() if type(module).__name__ == "Int2Linear"))
    inputs = tokenizer("The old house stood", return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    print(tokenizer.decode(tokens[0]))


if __name__ == "__main__":
    main()
