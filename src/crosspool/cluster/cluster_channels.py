"""ClusterChannels: has ranks open the channels that their models need, and close those that none needs any more."""

from collections.abc import Callable, Iterable

from crosspool.cluster import messages
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.channel import link_bytes
from crosspool.cluster.channel_book import ChannelBook
from crosspool.cluster.messages import ToRank
from crosspool.cluster.region import Region


class ClusterChannels:
    """book: which channels there are. open_region: shared memory for one link. send: to a rank that is up (`is_up`)."""

    def __init__(
        self,
        book: ChannelBook,
        open_region: Callable[[int], Region],
        send: Callable[[str, ToRank], None],
        is_up: Callable[[str], bool],
    ) -> None:
        self.book = book
        self._open_region, self._send, self._is_up = open_region, send, is_up

    def open_missing(self, placements: Iterable[ModelPlacement]) -> None:
        """Open what models lack between ranks that are up. Raises OSError where there is no memory for it."""
        for link in self.book.missing(placements, self._is_up):
            region = self._open_region(link_bytes(link.capacity))
            try:
                self._send(link.rank, messages.OpenChannels(link.lane, link.peer, link.capacity, region))
                self._send(link.peer, messages.OpenChannels(link.lane, link.rank, link.capacity, region, is_far=True))
            finally:
                region.close()
            self.book.opened(link)

    def close_unused(self, placements: Iterable[ModelPlacement]) -> None:
        """Close what none of the models needs."""
        for rank, peer in self.book.unused(placements):
            self._send(rank, messages.CloseChannels(peer))
            self._send(peer, messages.CloseChannels(rank))
