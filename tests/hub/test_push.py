"""A push is one commit or nothing, private unless asked otherwise, and its failures say in one line what to do."""

from __future__ import annotations

import sys

import pytest
from huggingface_hub import constants
from sentence_transformers import SentenceTransformerTrainingArguments

from st_cached_extras.recipes import hub as pushing
from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.hub import Push, check_push, push_folder, take_push

WEIGHTS = b"weights" * 1000


@pytest.fixture
def folder(tmp_path):
    """What a recipe leaves: a card, a figure, weights, and a hidden file that is nobody's business."""
    folder = tmp_path / "final"
    (folder / "1_Pooling").mkdir(parents=True)
    for path, content in {
        "README.md": b"---\ntags: [st-cached-extras]\n---\n# A model\n",
        "retrieval.png": b"a picture",
        "model.safetensors": WEIGHTS,
        "1_Pooling/config.json": b"{}",
        ".cache": b"private",
    }.items():
        (folder / path).write_bytes(content)
    return folder


def pushed_files(folder) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".cache"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def arguments(tmp_path, **options) -> SentenceTransformerTrainingArguments:
    options = {"push_to_hub": True, "hub_token": "hf_me", "report_to": "none", "use_cpu": True, **options}
    return SentenceTransformerTrainingArguments(output_dir=str(tmp_path / "out" / "finder"), **options)


def test_a_push_is_one_commit_of_a_private_model(hub, folder):
    url = push_folder(folder, Push("me/finder", token="hf_me"))
    repository = hub.repositories["models", "me/finder"]
    assert repository.private
    assert repository.branches["main"].commits == ["Add a model trained with st-cached-extras"]
    assert url == f"{hub.url}/me/finder/commit/{repository.branches['main'].sha}"
    seen = hub.files("models", "me/finder")
    assert seen.pop(".gitattributes")
    assert seen == pushed_files(folder)


def test_a_public_model_and_a_branch_are_made_when_asked_for(hub, folder):
    push_folder(folder, Push("me/finder", private=False, token="hf_me", revision="trial"))
    assert not hub.repositories["models", "me/finder"].private
    assert list(hub.files("models", "me/finder")) == [".gitattributes"]
    assert "model.safetensors" in hub.files("models", "me/finder", "trial")


@pytest.mark.parametrize(
    "fault",
    [
        ("POST", "/api/repos/create", 0),
        ("POST", "/api/models/me/finder/preupload/main", 0),
        ("POST", "/me/finder.git/info/lfs/objects/batch", 0),
        ("PUT", "/_lfs/.*", 0),
        ("PUT", "/_lfs/.*", 1),  # one large file has arrived
        ("POST", "/api/models/me/finder/commit/main", 0),
    ],
)
def test_an_error_midway_leaves_nothing_to_be_seen_and_a_second_push_goes_on(hub, folder, fault):
    method, pattern, after = fault
    hub.fail(method, pattern, status=507, after=after)  # of no room, which the client does not try again
    with pytest.raises(UsageError, match=r"push to me/finder failed.*507.*whole or not at all") as error:
        push_folder(folder, Push("me/finder", token="hf_me"))
    assert "\n" not in str(error.value)
    assert f"python -m st_cached_extras.recipes.hub {folder} me/finder" in str(error.value)
    assert list(hub.files("models", "me/finder")) in ([], [".gitattributes"])
    arrived = len(hub.blobs)

    push_folder(folder, Push("me/finder", token="hf_me"))
    assert pushed_files(folder).items() <= hub.files("models", "me/finder").items()
    large = 2  # the weights and the picture
    failed = 1 if method == "PUT" else 0
    assert hub.count("PUT", "/_lfs/.*") == large + failed  # what had arrived was not sent again
    assert arrived <= len(hub.blobs) == large


def test_a_hub_that_is_busy_once_is_asked_again(hub, folder):
    hub.fail("PUT", "/_lfs/.*", status=503)
    push_folder(folder, Push("me/finder", token="hf_me"))
    assert "model.safetensors" in hub.files("models", "me/finder")


def test_the_command_pushes_again(hub, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hub", str(folder), "finder", "--token", "hf_me"])
    pushing.main()
    assert f"pushed  {hub.url}/me/finder/commit/" in capsys.readouterr().out
    assert hub.repositories["models", "me/finder"].private


def test_an_existing_private_model_is_replaced_file_by_file(hub, folder):
    hub.add("models", "me/finder", {"notes.txt": b"mine", "README.md": b"old"}, private=True)
    push_folder(folder, Push("me/finder", token="hf_me"))
    seen = hub.files("models", "me/finder")
    assert seen["notes.txt"] == b"mine"
    assert seen["README.md"] == (folder / "README.md").read_bytes()


def test_a_private_push_into_a_public_model_is_refused(hub, folder, tmp_path):
    hub.add("models", "me/finder", {"README.md": b"old"})
    for push in (
        lambda: push_folder(folder, Push("me/finder", token="hf_me")),
        lambda: take_push(arguments(tmp_path)),
    ):
        with pytest.raises(UsageError, match=r"me/finder is there already and public.*--hub_private_repo false"):
            push()
    assert hub.files("models", "me/finder") == {"README.md": b"old"}
    push_folder(folder, Push("me/finder", private=False, token="hf_me"))
    assert hub.files("models", "me/finder")["model.safetensors"] == WEIGHTS


def test_the_wish_to_push_and_the_token_leave_the_trainers_arguments(hub, tmp_path):
    args = arguments(tmp_path)
    push = take_push(args)
    assert push == Push("me/finder", private=True, token="hf_me")
    assert "hf_me" not in repr(push)
    assert (args.push_to_hub, args.hub_token) == (False, None)
    assert take_push(args) is None
    assert not hub.repositories  # only asked, nothing made


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hub_token": "hf_wrong"}, r"cannot work: the Hub does not know the token. Get one at http"),
        ({"hub_token": "hf_reader"}, r"cannot work: the token may only read"),
        ({"hub_token": None}, r"there is no token. Run 'hf auth login', set HF_TOKEN, or give --hub_token"),
    ],
)
def test_a_push_that_cannot_work_is_refused_before_training_in_one_line(hub, tmp_path, options, message):
    with pytest.raises(UsageError, match=message) as error:
        take_push(arguments(tmp_path, **options))
    assert "\n" not in str(error.value)
    assert "hf_wrong" not in str(error.value)


def test_the_owner_must_be_one_for_whom_the_token_may_write(hub, folder):
    with pytest.raises(UsageError, match=r"the token may not write there.*--hub_model_id"):
        push_folder(folder, Push("you/finder", token="hf_me"))
    assert not hub.repositories


def test_a_hub_that_is_not_there_is_named_in_one_line(monkeypatch, hub):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"The push to me/finder cannot work: ConnectError: .*") as error:
        check_push(Push("me/finder", token="hf_me"))
    assert "\n" not in str(error.value)


def test_offline_mode_is_named(monkeypatch, hub):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"offline mode is enabled"):
        check_push(Push("me/finder", token="hf_me"))


def test_an_empty_folder_is_not_pushed(hub, tmp_path):
    with pytest.raises(UsageError, match="There are no files in"):
        push_folder(tmp_path, Push("me/finder", token="hf_me"))
    assert not hub.repositories
