"""``trirun doctor``: can this machine run trirun, and on which kernels?"""

from __future__ import annotations

from ..console import Console
from ..errors import CheckFailed
from .shared.options import Json


def command(json: Json = False) -> None:
    """Check versions, compiled kernels and devices, and run each kernel once against its reference.

    Exit code 6 when a check fails.

    Example: trirun doctor --json
    """
    console = Console(as_json=json)
    from ..workflows.diagnose import diagnose

    findings = list(diagnose())
    failed = [finding for finding in findings if finding.status == "fail"]
    console.json(
        "doctor/1",
        {
            "ok": not failed,
            "findings": [
                {"name": finding.name, "status": finding.status, "detail": finding.detail} for finding in findings
            ],
        },
    )
    if not json:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            console.text(f"{finding.status:>4}  {finding.name:<{width}}  {finding.detail}")
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(findings)} checks failed")
