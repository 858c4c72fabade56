"""Production traffic on models with several KV cache groups, with faults of the instance itself.

The trace is not part of the repository; where it is not found beside the checkout, these tests are skipped.
"""

import json
from pathlib import Path

import pytest

from kvreplay.cli.app import run_app

PUBLIC = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
pytestmark = pytest.mark.skipif(not PUBLIC.exists(), reason="the public conversation trace is not beside the checkout")

FAULTS = (
    "abort:p=0.02,when=running",
    "scheduler.preempt:at=request.first_token,p=0.02",
    "cache.reset:at=30s",
    "cache.reset:at=50s,what=running",
    "peer-crash:at=80s,down=20s",
)
FIRST_MINUTES = 400


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "conversations.parquet"
    assert run_app(["import", "mooncake", str(PUBLIC), "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("preset", ["gemma-hybrid", "qwen-gdn-hybrid"])
def test_whatever_happens_to_the_instance_no_law_is_broken(
    preset: str, conversations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", str(conversations), "--config", "single", "--set", f"model.preset={preset}", "--json"]
    arguments += ["--limit", str(FIRST_MINUTES), *(word for fault in FAULTS for word in ("--inject", fault))]
    status = run_app(arguments)
    document = json.loads(capsys.readouterr().out)
    assert (status, document["verdict"], document["violations"]) == (0, "passed", [])
    assert all(fault["fired"] for fault in document["faults"]), document["faults"]
    requests = document["requests"]
    assert requests["stalled"] == 0
    assert requests["finished"] + requests["failed"] + requests["aborted"] + requests["rejected"] == requests["total"]
