"""Names and docstrings of packages as pairs of texts."""

import sysconfig

from st_cached_extras.data.docstrings import docstring_pairs

SOURCE = '''
class BatchSampler:
    """Draws rows
    for a batch.

    More of it."""

    def next_batch_of_rows(self):
        """Too short."""

def silent(): ...
'''


def test_names_come_in_words_with_the_first_paragraph(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "good.py").write_text(SOURCE)
    (tmp_path / "package" / "broken.py").write_text("def")
    assert list(docstring_pairs(["package", "absent"])) == [("batch sampler", "Draws rows for a batch.")]
