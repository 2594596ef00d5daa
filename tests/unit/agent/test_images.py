"""Images of prompts, tools and requests: the engine gets the pixels of the placeholders that it is given."""

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from rlsys.agent.collate import collate_episodes, with_branches
from rlsys.agent.endpoint import Endpoint
from rlsys.agent.episode_log import EpisodeEnd
from rlsys.agent.presets import ToolWorkflow, VisionRLVRWorkflow, load_workflow
from rlsys.agent.runner import EpisodeResult, EpisodeRunner, EpisodeStart
from rlsys.agent.session import Score, Session, plain_message
from rlsys.agent.template import ChatTemplate
from rlsys.agent.tool_pool import EpisodeTools
from rlsys.agent.tools import tool_of
from rlsys.data.chat import encode_text
from rlsys.data.images import load_image
from rlsys.data.vision_processor import VisionProcessor
from rlsys.protocol import IMAGES, DataProto, object_array
from rlsys.types import SamplingParams
from tests.timing import scaled_s
from tests.tiny_vision import write_model
from tests.unit.agent.engine import RandomEngine, settings_for, tool_pool
from tests.unit.agent.templates import HERMES
from trainer.episodes import prompt_of_row

IN_PARTS = (
    "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
)
CONTENT = "{% if m.content is string %}{{ m.content }}{% else %}" + IN_PARTS + "{% endif %}"
CALL = '<tool_call>{"name": "look", "arguments": {"side": 24}}</tool_call>'


LOOK = '''
from PIL import Image


def look(side: int) -> list:
    """Take a picture.

    Args:
        side: Its size.
    """
    return ["It is red.", Image.new("RGB", (side, 16), "red")]
'''


def picture(colour: str, width: int = 16) -> Image.Image:
    return Image.new("RGB", (width, 16), colour)


def url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def user(*parts: Any) -> dict[str, Any]:
    """A message of texts and images."""
    forms = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"role": "user", "content": forms}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = write_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = HERMES.replace("{{ m.content }}", CONTENT)
    processor = VisionProcessor.from_path(str(folder), tokenizer, settings={}, limit_images=3)
    return ChatTemplate(tokenizer, processor=processor)


async def right(row: Any, answer: str, extra: Any) -> Score:
    return Score(float(answer == "ok"))


def engine_of(template: ChatTemplate, write: Any = lambda text: "ok") -> RandomEngine:
    return RandomEngine(template.tokenizer, write)


def check(engine: RandomEngine, template: ChatTemplate, *shas: int) -> None:
    """Each draw had as many placeholders as the features of its images, of which there were so many."""
    assert template.processor is not None
    token, merge = template.processor.config.image_token_id, template.processor.config.vision_config.spatial_merge_size
    for (ids, _), images, count in zip(engine.draws, engine.images, shas, strict=True):
        grids = [grid for one in images for grid in one.tensors["image_grid_thw"]]
        assert sum(len(one.shas) for one in images) == len(grids) == count
        assert ids.count(token) == sum(int(grid.prod()) // merge**2 for grid in grids)


async def test_images_of_later_turns_join_those_before(template: ChatTemplate) -> None:
    engine = engine_of(template)
    session = Session(settings_for(engine, template), seed=1)
    session.add(user(picture("red"), "What is it? ", picture("blue", 32)))
    await session.draw()
    session.add("And now?")
    await session.draw()
    session.add(user("And this?", picture("red")))
    await session.draw()
    check(engine, template, 2, 2, 3)
    for (before, drawn), (after, _) in zip(engine.draws, engine.draws[1:]):
        assert after[: len(before) + len(drawn)] == before + drawn
    (row,) = session.trace.rows(1.0)
    assert row.images == engine.images[-1]
    assert row.images[0].shas[0] == row.images[1].shas[0]  # the same red picture
    session.add(user(picture("green")))
    with pytest.raises(ValueError, match="limit_images=3"):
        await session.draw()
    other = Session(settings_for(engine, template), seed=1)
    other.add(user(picture("green"), "What is it? ", picture("blue", 32)))
    await other.draw()
    assert other.trace.spans[0].ids == session.trace.spans[0].ids
    assert engine.images[-1][0].shas != engine.images[0][0].shas


async def test_a_text_beside_an_image_that_no_row_can_hold_is_not_made_tokens(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encoded = engine_of(template), list[int]()

    def noted(tokenizer: Any, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode_text(tokenizer, text, **options)

    monkeypatch.setattr("rlsys.agent.template.encode_text", noted)
    huge = user("x" * 5_000_000, picture("red"))
    for before, end in (([], "context"), ([user("a")], "length")):
        session = Session(settings_for(engine, template, limits=(1000, 1000)), seed=1)
        for message in before:
            session.add(message)
            await session.draw()
        session.add(huge)
        with pytest.raises(EpisodeEnd, match=end):
            await session.draw()
        assert session.end == end
    assert max(encoded) < 1000


async def test_a_conversation_with_another_image_is_another_one(template: ChatTemplate) -> None:
    engine = engine_of(template)
    session = Session(settings_for(engine, template), seed=1)
    for colour in ("red", "blue", "red"):
        answer = await session.draw([user(picture(colour), "What?")])
        await session.draw([user(picture(colour), "What?"), answer.message, user("Sure?")])
    assert len([span for span in session.trace.spans if span.parent is None]) == 2
    assert [images[0].shas for images in engine.images[:2]] == [images[0].shas for images in engine.images[4:]]
    assert engine.images[0][0].shas != engine.images[2][0].shas


@pytest.mark.parametrize("drawn", ["I see <|image_pad|>", "ok"])
async def test_no_image_is_added_behind_a_placeholder_that_the_model_drew(template: ChatTemplate, drawn: str) -> None:
    engine = engine_of(template, lambda text: drawn)
    session = Session(settings_for(engine, template), seed=1)
    session.add(user("Hello", picture("red")))
    await session.draw()
    session.add(user("And this?", picture("blue")))
    if drawn == "ok":
        await session.draw()
        return
    with pytest.raises(EpisodeEnd, match="image_token"):
        await session.draw()
    with pytest.raises(ValueError, match=r"2 placeholders <\|image_pad\|> or .* in the rendered prompt, not 1"):
        await session.draw([user("<|image_pad|>", picture("red"))])


async def test_the_model_sees_the_images_that_a_tool_returns(template: ChatTemplate, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    engine = engine_of(template, lambda text: "ok" if "tool_response" in text else CALL)
    session, pool = Session(settings_for(engine, template, grade=right), seed=1), tool_pool(num_workers=1)
    session.tools = EpisodeTools(pool, [tool_of(f"{tmp_path}/look.py:look")])
    try:
        score = await load_workflow(ToolWorkflow()).run({"prompt": [user("Look.")]}, session)
    finally:
        pool.close()
    assert score.reward == 1.0
    check(engine, template, 0, 1)
    shown, text = session.messages[2]["content"]
    assert np.array_equal(load_image(shown), picture("red", 24))
    assert text == {"type": "text", "text": "It is red."}
    assert json.dumps(session.log.rows())


@pytest.mark.parametrize("api", ["/chat/completions", "/responses", "/messages"])
async def test_programs_send_images(template: ChatTemplate, api: str) -> None:
    engine = engine_of(template)
    data = url(picture("red"))
    source = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
    part, text = {
        "/chat/completions": ({"type": "image_url", "image_url": {"url": data}}, "text"),
        "/responses": ({"type": "input_image", "image_url": data}, "input_text"),
        "/messages": ({"type": "image", "source": source}, "text"),
    }[api]
    wrong = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    endpoint, session = Endpoint(), Session(settings_for(engine, template), seed=1)
    opened = await endpoint.open(session)
    key = "input" if api == "/responses" else "messages"
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {opened.key}"}) as http:
            for first, status in ((part, 200), (wrong, 400), ({**part, "image_url": "data:,x", "source": None}, 400)):
                asked = [{"role": "user", "content": [first, {"type": text, "text": "What is it?"}]}]
                async with http.post(opened.base_url + api, json={key: asked, "max_tokens": 9}) as answer:
                    assert answer.status == status, await answer.text()
    finally:
        await endpoint.close()
    check(engine, template, 1)
    assert session.counts["bad_requests"] == 2


def test_episodes_on_rows_with_images_make_a_batch_with_their_pixels(template: ChatTemplate) -> None:
    assert template.processor is not None
    images = [template.processor.expand("<|image_pad|>", [picture(colour)])[1] for colour in ("red", "blue")]
    raw = [{"role": "user", "content": "<image>What is it?"}]
    rows = [{"raw_prompt": raw, IMAGES: one, "uid": str(n)} for n, one in enumerate(images)]
    prompts = [prompt_of_row(row) for row in rows]
    assert json.loads(json.dumps(prompts)) == prompts
    engine = engine_of(template)

    pool = tool_pool()
    runner = EpisodeRunner(settings_for(engine, template, grade=right), load_workflow("VisionRLVRWorkflow"), pool)
    starts = [EpisodeStart({"prompt": prompt}, 1, f"{n}") for n, prompt in enumerate(prompts)]
    starts.append(EpisodeStart({"prompt": [{"role": "user", "content": "Hi"}]}, 1, "text"))
    try:
        futures = runner.submit(starts, SamplingParams(8))
        *results, text = [future.result(scaled_s(60)) for future in futures]
    finally:
        runner.close()
        pool.close()
    assert text.end == "error"
    assert "the prompt has no image" in text.error
    columns = {"uid": object_array(["0", "1"]), IMAGES: object_array(images)}
    batch = DataProto.from_dict({"x": torch.zeros(2)}, columns)
    made = collate_episodes(results, batch, pad_token_id=0, prompt_length=80, response_length=8)
    shas = [[sha for one in row for sha in one.shas] for row in made.non_tensor_batch[IMAGES]]
    assert shas == [list(images[0][0].shas), list(images[1][0].shas)]
    assert made.tensors["token_level_scores"].sum(-1).tolist() == [1.0, 1.0]


def test_branches_of_an_episode_have_their_own_images(template: ChatTemplate) -> None:
    session = Session(settings_for(engine_of(template), template), seed=1)

    async def run() -> None:
        await session.draw([user(picture("red"), "What?")])
        await session.draw([user(picture("blue"), "What?")])

    asyncio.run(run())
    results = [EpisodeResult(session.trace.rows(1.0), 1.0, "stop"), EpisodeResult((), 0.0, "error")]
    columns = {"uid": object_array(["0", "1"]), IMAGES: object_array([(), ()])}
    prompts = DataProto.from_dict({"x": torch.zeros(2)}, columns, {"pad_token_id": 0})
    made = with_branches(
        collate_episodes(results, prompts, pad_token_id=0, prompt_length=80, response_length=8), max_rows=2
    )
    assert [len(row) for row in made.non_tensor_batch[IMAGES]] == [1, 1, 0, 0]
    first, second = (row[0].shas for row in made.non_tensor_batch[IMAGES][:2])
    assert first != second
    assert np.array_equal(made.tensors["input_ids"][0], made.tensors["input_ids"][1])


async def test_areals_vision_workflow_needs_no_job(template: ChatTemplate) -> None:
    engine, processor = engine_of(template), template.processor
    assert processor is not None

    def reward_fn(prompt: str, completion: str, *ids: Any, messages: Any) -> float:
        return prompt.count(workflow.image_token)

    workflow = VisionRLVRWorkflow(reward_fn, template.tokenizer, processor=processor, max_tokens=8)
    with pytest.raises(ValueError, match="no image"):
        await workflow.arun_episode(engine, {"messages": [user("What is it?")]})
    data = {"messages": [plain_message(user("What is it? ", picture("red", 32)))]}
    tensors = await workflow.arun_episode(engine, data)
    check(engine, template, 1)
    token = processor.config.image_token_id
    assert (tensors["input_ids"] == token).sum() == tensors["rewards"].item() > 1
    (images,) = workflow._process_images(data)
    assert images.shas == engine.images[0][0].shas
    assert workflow._format_vision_prompt(data) == template.tokenizer.decode(engine.draws[0][0])
