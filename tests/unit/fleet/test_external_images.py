"""Images as requests to servers carry them; tests/e2e/test_real_servers.py has servers that read them."""

from base64 import b64decode

import msgspec
import pytest
import torch
from transformers import AutoConfig

from rlsys.fleet.external.engine import VLLMRemoteEngine
from rlsys.fleet.external.settings import RemoteSettings
from rlsys.models.vision import joined_images
from rlsys.protocol import IMAGES
from rlsys.rollout.sglang.given_images import image_record, read_image_record
from rlsys.rollout.vllm.given_images import image_features
from rlsys.types import ModelRequest, SamplingParams
from tests.servers import RuleBrain, Server
from tests.timing import scaled_s
from tests.tiny_vision import IMAGE, MODELS, image_ids, random_images, random_video, vision_rows


def row_of(family: str) -> tuple[list[int], tuple]:
    """The prompt of a row with two images."""
    rows = vision_rows(MODELS[family])
    ids = rows.tensors["prompts"][2][rows.tensors["attention_mask"][2, : rows.tensors["prompts"].shape[1]].bool()]
    return ids.tolist(), rows.non_tensor_batch[IMAGES][2]


def unpacked(text: str) -> dict[str, torch.Tensor]:
    """The tensors of an item, read as vLLM's decoder reads them."""
    item = msgspec.msgpack.decode(b64decode(text))
    assert all(part["field"][0] == ("flat" if part["field"][1].get("slices") else "batched") for part in item.values())
    return {
        name: torch.frombuffer(bytearray(data.data), dtype=getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, data) in ((name, part["data"]) for name, part in item.items())
    }


def test_features_of_grids_are_cut_by_image_and_stand_at_their_placeholders() -> None:
    ids, images = row_of("qwen2_5_vl")
    features = image_features(ids, AutoConfig.for_model(**MODELS["qwen2_5_vl"]), images, salt="7")
    items = [unpacked(text) for text in features["kwargs_data"]["image"]]
    assert [item["image_grid_thw"].tolist() for item in items] == [[1, 2, 4], [1, 4, 2]]
    assert torch.equal(torch.cat([item["pixel_values"] for item in items]), joined_images(images)["pixel_values"])
    spans = [range(at["offset"], at["offset"] + at["length"]) for at in features["mm_placeholders"]["image"]]
    assert [at for span in spans for at in span] == [at for at, token in enumerate(ids) if token == IMAGE]
    assert len({*features["mm_hashes"]["image"]}) == 2
    assert all(name.startswith("7/") for name in features["mm_hashes"]["image"])


def test_features_of_tiles_are_items_of_their_own() -> None:
    ids, images = row_of("smolvlm")
    features = image_features(ids, AutoConfig.for_model(**MODELS["smolvlm"]), images, salt="7")
    items = [unpacked(text) for text in features["kwargs_data"]["image"]]
    assert torch.equal(torch.stack([item["pixel_values"] for item in items]), joined_images(images)["pixel_values"])
    assert [at["length"] for at in features["mm_placeholders"]["image"]] == [4] * len(items)


def test_a_record_for_sglang_is_read_as_it_was_written() -> None:
    _, images = row_of("qwen2_5_vl")
    images = [*images, random_video(MODELS["qwen2_5_vl"], (3, 4, 2), seconds=0.1)]
    read, salt = read_image_record(image_record(images, salt="7"))
    assert (salt, read, [one.seconds for one in read]) == ("7", images, [0.0, 0.1])
    assert all(torch.equal(joined_images(read)[name], tensor) for name, tensor in joined_images(images).items())


def test_features_of_a_video_are_one_item_with_the_time_of_its_steps() -> None:
    config, video = MODELS["qwen2_5_vl"], random_video(MODELS["qwen2_5_vl"], (3, 4, 2), seconds=0.1)
    still = random_images(config, [(2, 4)])
    ids = [7, *image_ids(config, (3, 4, 2)), 7, *image_ids(config, (2, 4))]
    features = image_features(ids, AutoConfig.for_model(**config), [video, still], salt="7")
    (item,) = (unpacked(text) for text in features["kwargs_data"]["video"])
    assert features["mm_placeholders"]["video"] == [{"offset": 2, "length": 6}]
    assert features["mm_placeholders"]["image"] == [{"offset": 11, "length": 2}]
    assert (item["video_grid_thw"].tolist(), item["second_per_grid_ts"].item()) == ([3, 4, 2], 0.1)
    assert torch.equal(item["pixel_values_videos"], video.tensors["pixel_values"])


def test_a_server_that_may_normalise_pixels_again_gets_none() -> None:
    ids, images = row_of("qwen2_5_vl")
    server = Server("vllm", RuleBrain()).start()
    engine = VLLMRemoteEngine(RemoteSettings((server.url,), request_s=scaled_s(20)))
    try:
        with pytest.raises(ValueError, match="--no-mm-device-do-normalize"):
            engine.generate([ModelRequest(tuple(ids), SamplingParams(2), images=images)])
        assert server.requests == []
    finally:
        engine.close()
        server.close()
