from st_cached_extras.distributed.world import RankError, World

__all__ = ["RankError", "World"]
