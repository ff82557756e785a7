"""Pushing a finished model to the Hub: whole, in one commit, or not at all.

    python -m st_cached_extras.recipes.hub output/text-embedder/final me/text-embedder

pushes a folder once more after a failed upload; large files that had arrived are not sent again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError

from st_cached_extras.recipes.errors import UsageError
from st_cached_extras.recipes.run import one_line, run

T = TypeVar("T")


@dataclass(frozen=True)
class Push:
    """A model repository to push to.

    Attributes:
        repo_id: "owner/name", or "name" for one of the user's own.
        private: whether the repository is private; only a new one can be made so.
        token: of the Hub; None for the one that ``hf auth login`` has stored or HF_TOKEN holds.
        revision: branch to push to; None for the main one.
    """

    repo_id: str
    private: bool = True
    token: str | None = field(default=None, repr=False)
    revision: str | None = None


def take_push(args: Any, name: str | None = None) -> Push | None:
    """Takes the wish to push, and the token, off the Trainer's arguments.

    The Trainer would push every checkpoint, and writes its arguments down beside the model. On the first rank the Hub
    is asked at once whether the push can work, so that a wrong token costs no training.

    Args:
        args: ``SentenceTransformerTrainingArguments``; their push_to_hub and hub_token are cleared.
        name: of the repository, where --hub_model_id gives none; None for that of the output folder.

    Returns:
        Where to push to, or None where no push is wanted.

    Raises:
        UsageError: the Hub cannot be reached, does not know the token, or the push would end in a public repository
            where a private one is wanted.
    """
    wanted, args.push_to_hub = args.push_to_hub, False
    token, args.hub_token = args.hub_token, None
    if not wanted:
        return None
    push = Push(
        repo_id=args.hub_model_id or name or Path(args.output_dir).name,
        private=args.hub_private_repo is not False,
        token=token,
        revision=args.hub_revision,
    )
    return check_push(push) if args.process_index == 0 else push


def check_push(push: Push) -> Push:
    """Asks the Hub whether a push can work, and returns it with the owner in its name.

    Raises:
        UsageError: as in `take_push`.
    """
    api = HfApi(token=push.token)
    user = _asking(api.whoami, f"The push to {push.repo_id} cannot work")
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UsageError(
            f"The push to {push.repo_id} cannot work: the token may only read. Make one that may write at "
            f"{constants.ENDPOINT}/settings/tokens."
        )
    repo_id = push.repo_id if "/" in push.repo_id else f"{user['name']}/{push.repo_id}"
    _check_privacy(api, repo_id, push.private)
    return Push(repo_id, push.private, push.token, push.revision)


def push_folder(folder: str | os.PathLike, push: Push) -> str:
    """Uploads the files of a folder as one commit: after a failure they are on the Hub whole or not at all.

    A repository that is not there is made; files of an existing one are replaced, and others in it are kept. Large
    files are sent ahead of the commit and are not sent again by a second try.

    Args:
        folder: what to upload; hidden files are left out.
        push: where to.

    Returns:
        The URL of the commit.

    Raises:
        UsageError: the push failed; says why, and how to try again.
    """
    folder = Path(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    if not files:
        raise UsageError(f"There are no files in {folder} to push to {push.repo_id}.")
    operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
    api = HfApi(token=push.token)

    def upload() -> str:
        repo_id = api.create_repo(push.repo_id, private=push.private, exist_ok=True).repo_id
        _check_privacy(api, repo_id, push.private)
        if push.revision is not None:
            api.create_branch(repo_id, branch=push.revision, exist_ok=True)
        message = "Add a model trained with st-cached-extras"
        return api.create_commit(repo_id, operations, commit_message=message, revision=push.revision).commit_url

    again = f"python -m st_cached_extras.recipes.hub {folder} {push.repo_id}" + ("" if push.private else " --public")
    return _asking(
        upload,
        f"The push to {push.repo_id} failed",
        f" It is there whole or not at all, and whole in {folder}: push once more with: {again}",
    )


def _check_privacy(api: HfApi, repo_id: str, private: bool) -> None:
    """A model that is wanted private must not end in a repository that has long been public."""
    try:
        public = not _asking(lambda: api.model_info(repo_id), f"{repo_id} cannot be looked at").private
    except _NotThere:
        return
    if private and public:
        raise UsageError(
            f"{repo_id} is there already and public, and its visibility stays as it is. Give another --hub_model_id, "
            "or --hub_private_repo false to publish the model."
        )


class _NotThere(UsageError):
    """There is no such repository yet."""


def _asking(ask: Callable[[], T], failure: str, way_out: str = "") -> T:
    """What the Hub answers; its many errors in one line."""
    try:
        return ask()
    except UsageError:
        raise
    except Exception as error:  # also the HTTP client's own, of which each version of huggingface_hub has others
        cause = next((e for e in _causes(error) if isinstance(e, HfHubHTTPError | LocalTokenNotFoundError)), error)
        kind = _NotThere if isinstance(cause, RepositoryNotFoundError) else UsageError
        raise kind(f"{failure}: {_reason(cause)}{way_out}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _reason(error: BaseException) -> str:
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token. Run 'hf auth login', set HF_TOKEN, or give --hub_token."
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or the token may not see it."
    said = one_line(error).rstrip(".")
    if not isinstance(error, HfHubHTTPError):
        return f"{type(error).__name__}: {said}."
    status = error.response.status_code
    if status == 401:
        return f"the Hub does not know the token. Get one at {constants.ENDPOINT}/settings/tokens."
    if status == 403:
        return "the token may not write there: check its permissions, and the owner in --hub_model_id."
    return f"the Hub answered {status}: {said}."


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m st_cached_extras.recipes.hub", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", help="Folder of the model.")
    parser.add_argument("repo_id", help="Where to push it: owner/name, or name.")
    parser.add_argument("--public", action="store_true", help="Make a public repository.")
    parser.add_argument("--token", help="Default: the token of 'hf auth login', or HF_TOKEN.")
    arguments = parser.parse_args()
    push = check_push(Push(arguments.repo_id, private=not arguments.public, token=arguments.token))
    print(f"pushed  {push_folder(arguments.folder, push)}")


if __name__ == "__main__":
    run(main)
