"""``python -m trirun_cli.integrations.vllm_launch serve DIR ...`` is ``vllm serve DIR ...``, whatever the package that
vLLM came in is called: the command ``vllm`` starts only where that is "vllm", and builds for CPUs have other names."""

from __future__ import annotations

import os


def main() -> None:
    """Run vLLM's command ``serve`` with the arguments of this process."""
    # As the command does, before anything of vLLM's is imported.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="vLLM's server")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    given = parser.parse_args()
    serve.validate(given)
    serve.cmd(given)


if __name__ == "__main__":
    main()
