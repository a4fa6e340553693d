"""What the script of replicas counts as lost with a killed server, and as lost otherwise."""

from replicas_check import counts

from trirun_cli.bench.client import Sample


def test_an_error_belongs_to_the_killed_server_if_its_request_was_under_way() -> None:
    lost, late, early = (Sample(prompt, error=f"error {prompt}") for prompt in range(3))
    good, other = Sample(3, text="a"), Sample(3, text="b")
    samples = [(9.0, 10.1, lost), (20.0, 21.0, late), (8.0, 9.5, early), (1.0, 2.0, good), (9.0, 12.0, good)]
    found = counts(samples, killed=10.0)
    assert (found["requests"], found["answered"]) == (5, 2)
    assert found["lost_with_the_killed_server"] == 1 and found["lost_otherwise"] == 2
    assert found["errors"] == ["error 1", "error 2"] and found["prompts_with_two_answers"] == 0
    assert counts([*samples, (1.0, 2.0, other)], killed=10.0)["prompts_with_two_answers"] == 1
