"""What ui.perfetto.dev and chrome://tracing ask of a file, as the documentation of the trace event format has it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

Event = dict[str, Any]


def problems(events: Sequence[Event]) -> list[str]:
    """What is wrong with the events of a timeline: fields, names of tracks, nesting, ends of arrows."""
    return [*_fields(events), *_tracks(events), *_nesting(events), *_arrows(events)]


def _fields(events: Sequence[Event]) -> Iterator[str]:
    for event in events:
        kind, args = event.get("ph"), event.get("args", {})
        if not event.get("name") or not isinstance(event["name"], str):
            yield f"no name: {event}"
        if any(type(event.get(key)) is not int or not 0 <= event[key] < 2**31 for key in ("pid", "tid")):
            yield f"pid and tid must be 31-bit integers: {event}"
        if kind != "M" and (type(event.get("ts")) is not int or event["ts"] < 0):
            yield f"ts must be integer microseconds: {event}"
        if kind == "X" and (type(event.get("dur")) is not int or event["dur"] < 0):
            yield f"dur must be integer microseconds: {event}"
        elif kind == "C" and not (args and all(type(value) in (int, float) for value in args.values())):
            yield f"a counter needs numbers: {event}"
        elif kind == "M" and (
            event["name"] not in ("process_name", "thread_name") or type(args.get("name")) is not str
        ):
            yield f"metadata must name a process or a thread: {event}"
        elif kind not in ("X", "C", "M", "s", "f"):
            yield f"unknown kind: {event}"


def _tracks(events: Sequence[Event]) -> Iterator[str]:
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["pid"] not in processes or (event["ph"] == "X" and (event["pid"], event["tid"]) not in threads):
            yield f"its track has no name: {event}"


def _spans(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    return spans


def _nesting(events: Sequence[Event]) -> Iterator[str]:
    """Spans of a track may be one inside another; Perfetto drops one that overlaps the end of another."""
    for spans in _spans(events).values():
        open_until: list[int] = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            while open_until and open_until[-1] <= span["ts"]:
                open_until.pop()
            if open_until and span["ts"] + span["dur"] > open_until[-1]:
                yield f"it overlaps the end of another span: {span}"
            open_until.append(span["ts"] + span["dur"])


def _arrows(events: Sequence[Event]) -> Iterator[str]:
    """Each arrow has one start and one end, with the same name, category and id, inside a span each."""
    spans = _spans(events)
    flows = [event for event in events if event["ph"] in "sf"]
    for (_, _, flow), count in Counter((e["name"], e["cat"], e["id"]) for e in flows).items():
        ends = sorted((e for e in flows if e["id"] == flow), key=lambda e: e["ph"] == "f")
        if count != 2 or [e["ph"] for e in ends] != ["s", "f"] or ends[0]["ts"] > ends[1]["ts"]:
            yield f"not one start and one later end: {ends}"
        if not 0 <= int(flow, 16) < 2**64:
            yield f"not a hexadecimal number of 64 bits: {flow}"
    for event in flows:
        inside = [s for s in spans[event["pid"], event["tid"]] if s["ts"] <= event["ts"] <= s["ts"] + s["dur"]]
        if not inside or (event["ph"] == "f" and event.get("bp") != "e"):
            yield f"it is bound to no span: {event}"
