"""``SHA256SUMS``: any bit that differs from what was written is found, by ``trirun verify`` and by ``--verify``."""

import json
import random
import subprocess

import pytest
import yaml

from trirun_cli.checkpoint.verify import require_whole
from trirun_cli.checkpoint.writer import file_hash
from trirun_cli.errors import TrirunError


def test_every_flipped_bit_is_found(packed, copy_of):
    damaged = copy_of(packed)
    require_whole(damaged)
    random.seed(0)
    for file in sorted(damaged.iterdir()):
        data = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else min(400, len(data))
        # The whole of a short file is its header; of weights: length, header, data, and the last byte.
        places = [0, len(data) - 1, *random.choices(range(header), k=20), *random.choices(range(len(data)), k=20)]
        for place in places:
            bit = 1 << random.randrange(8)
            data[place] ^= bit
            file.write_bytes(data)
            with pytest.raises(TrirunError) as refused:
                require_whole(damaged)
            assert refused.value.exit_code in (3, 6)
            data[place] ^= bit
        file.write_bytes(data)
    require_whole(damaged)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "trirun_recipe.yaml"])
def test_verify_names_the_file(trirun, packed, copy_of, name):
    damaged = copy_of(packed)
    data = bytearray((damaged / name).read_bytes())
    # Within a value: every reader still takes the file.
    place = data.rfind(b"1") if name != "model.safetensors" else len(data) - 100
    data[place] ^= 2
    (damaged / name).write_bytes(data)
    code, out, _ = trirun("verify", damaged, "--json")
    if out:
        assert code == 6 and name in [problem["where"] for problem in json.loads(out)["problems"]]
    for command in (("generate", "-p", "x"), ("chat",), ("serve",), ("eval",)):
        code, out, err = trirun(*command, "--checkpoint", damaged, "--verify")
        assert code == 6 and f"{name}: its contents changed" in " ".join(err.split()) and out == ""


def test_a_file_that_is_gone_or_new_is_found(packed, copy_of):
    changed = copy_of(packed)
    (changed / "README.md").write_text("Written after the checkpoint.")
    require_whole(changed)
    (changed / "modeling.py").write_text("")
    with pytest.raises(TrirunError, match=r"modeling\.py: no checksum is recorded"):
        require_whole(changed)
    (changed / "modeling.py").unlink()
    (changed / "tokenizer.json").unlink()
    with pytest.raises(TrirunError, match=r"tokenizer\.json: SHA256SUMS names it"):
        require_whole(changed)


def test_verify_passes_a_whole_checkpoint_and_refuses_one_without_checksums(trirun, packed, plain_model):
    code, _, _ = trirun("generate", packed, "-p", "x", "--max-tokens", "1", "--verify")
    assert code == 0
    code, _, err = trirun("generate", plain_model, "-p", "x", "--verify")
    assert code == 3 and "--verify needs SHA256SUMS" in " ".join(err.split())


def test_other_programs_read_the_checksums(packed):
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=packed, check=True)


def test_checkpoints_of_before_record_their_weights_in_the_recipe(trirun, packed, copy_of):
    older = copy_of(packed)
    (older / "SHA256SUMS").unlink()
    assert trirun("verify", older)[0] == 6
    recipe = older / "trirun_recipe.yaml"
    recorded = {"files": {"model.safetensors": file_hash(older / "model.safetensors")}}
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | recorded))
    assert trirun("verify", older)[0] == 0
