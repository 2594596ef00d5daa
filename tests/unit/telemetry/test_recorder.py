"""A worker's notes travel to the controller and merge."""

import pickle

import pytest

from rlsys.telemetry.memory import memory_metrics
from rlsys.telemetry.recorder import StageRecorder, StageReport, merged


def test_stages_of_two_workers_merge() -> None:
    recorders = [StageRecorder("actor 0"), StageRecorder("actor 1")]
    for recorder in recorders:
        with recorder.stage("update_actor"):
            pass
    with pytest.raises(ValueError, match="boom"), recorders[1].stage("save"):
        raise ValueError("boom")
    report = merged(pickle.loads(pickle.dumps(r.drain())) for r in recorders)
    assert [e["name"] for e in report.events if e["ph"] == "X"] == ["update_actor", "update_actor", "save"]
    assert [(m.worker, m.stage) for m in report.memory] == [
        ("actor 0", "update_actor"),
        ("actor 1", "update_actor"),
        ("actor 1", "save"),
    ]
    assert memory_metrics(report.memory)["perf/memory/update_actor/rss_peak_gb"] > 0
    assert recorders[0].drain() == StageReport()
