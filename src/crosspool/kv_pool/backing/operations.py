"""Operations: what a driver does for pages, ranges and frames, one at a time.

The mapper gives these out, `vmm.py` carries them out.
"""

from dataclasses import dataclass

from crosspool.kv_pool.backing.mapped_page import MappedPage, ModelRange


@dataclass(frozen=True, slots=True)
class MapPage:
    page: MappedPage


@dataclass(frozen=True, slots=True)
class UnmapPage:
    page: MappedPage


@dataclass(frozen=True, slots=True)
class FreeRange:
    model_range: ModelRange


@dataclass(frozen=True, slots=True)
class CreateFrame:
    frame: int


@dataclass(frozen=True, slots=True)
class ReleaseFrame:
    frame: int


Operation = MapPage | UnmapPage | FreeRange | CreateFrame | ReleaseFrame
