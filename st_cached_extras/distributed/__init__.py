from st_cached_extras.distributed.world import World

__all__ = ["World"]
