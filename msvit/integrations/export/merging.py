"""ToMe in exported files, where every image has as many tokens: static shapes, and no scatter.

    merging = RowMerging(msvit.ToMe(r=13))
    backbone(tokens, reducer=merging)              # tokens in the layout of `fine_rows`
    merge_rows(tokens, keys, num_merged=13)        # one block

The numbers are those of `msvit.reduction.tome`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from msvit.execution.export_layout import ExportLayout, ranks
from msvit.reduction import Reducer, ToMe
from msvit.reduction.tome import num_unmerged
from msvit.shapes import Float, Int
from msvit.types import Heads, Layout, TokenBatch, changed


class RowMerging(Reducer):
    """The merging of a `ToMe`, for rows of tokens that are all active."""

    can_be_traced = True

    def __init__(self, tome: ToMe) -> None:
        super().__init__()
        self.tome = tome

    def begin(self, tokens: TokenBatch) -> TokenBatch:
        """Count each token once; every patch has a token of its own."""
        layout = tokens.layout
        first = torch.arange(layout.batch)[:, None] * layout.max_len
        owner = first + torch.arange(layout.num_prefix, layout.max_len)
        return changed(tokens, layout=changed(layout, size=torch.ones_like(layout.weight), patch_to_slot=owner))

    def acts_between(self, index: int) -> bool:
        return self.tome.acts_between(index)

    def between(self, index: int, start: Layout, tokens: TokenBatch, heads: Heads) -> TokenBatch:
        count = tokens.layout.max_len - tokens.layout.num_prefix
        num_merged = count - num_unmerged(count, self.tome.num_merged(index), self.tome.rate)
        return merge_rows(tokens, heads.k, num_merged) if num_merged else tokens


def merge_rows(tokens: TokenBatch, keys: Float[Tensor, "slots heads head_dim"], num_merged: int) -> TokenBatch:
    """Merge the `num_merged` most similar pairs of each image to their means by area."""
    layout = tokens.layout
    assert isinstance(layout, ExportLayout)
    assert layout.size is not None, "begin gives sizes"
    batch, length, prefix = layout.batch, layout.max_len, layout.num_prefix
    first = list(range(prefix + prefix % 2, length, 2))  # even places, as in `bipartite_matching`
    second = list(range(prefix + 1 - prefix % 2, length, 2))
    even, odd = slice(first[0], None, 2), slice(second[0], None, 2)
    num_kept = len(first) - num_merged

    metric = F.normalize(keys.mean(1), dim=-1).reshape(batch, length, -1)
    best, partner = (metric[:, even] @ metric[:, odd].transpose(1, 2)).max(2)  # (b, even)
    merged = ranks(best) < num_merged
    leaves = merged[:, None] & (partner[:, None] == torch.arange(len(second))[:, None])  # (b, odd, even)
    added = leaves.to(tokens.x.dtype)
    order = torch.where(merged, 0, len(first)) - torch.arange(len(first))  # those that stay, by place: no ties
    kept = order.float().topk(num_kept, dim=1).indices  # (b, num_kept)

    x, size, token = (t.reshape(batch, length, -1) for t in (tokens.x, layout.size, layout.token))
    weighted = x * size
    total = size[:, odd] + added @ size[:, even]
    mean = (weighted[:, odd] + added @ weighted[:, even]) / total
    new_x, new_size, new_token = (
        torch.cat([t[:, :prefix], take(t[:, even], kept), new], dim=1).flatten(0, 1)
        for t, new in ((x, mean), (size, total), (token, token[:, odd]))
    )

    stay = prefix + (~merged).long().cumsum(1) - 1
    place = torch.where(merged, prefix + num_kept + partner, stay)  # (b, even): where each token is now
    fixed = torch.arange(prefix), prefix + num_kept + torch.arange(len(second))
    places = torch.cat([fixed[0].expand(batch, -1), place, fixed[1].expand(batch, -1)], dim=1)
    listed = [*range(prefix), *first, *second]
    places = places[:, torch.tensor([listed.index(each) for each in range(length)])]
    image, new_length = torch.arange(batch), length - num_merged
    assert layout.patch_to_slot is not None, "begin gives owners"
    smaller = changed(
        layout,
        token=new_token[:, 0],
        image=image[:, None].expand(batch, new_length).flatten(),
        weight=torch.ones_like(new_size[:, 0]),
        cu_seqlens=torch.arange(batch + 1) * new_length,
        max_len=new_length,
        size=new_size[:, 0],
        patch_to_slot=(places + image[:, None] * new_length).flatten()[layout.patch_to_slot],
    )
    return changed(tokens, x=new_x, layout=smaller)


def take(rows: Float[Tensor, "b n d"], index: Int[Tensor, "b m"]) -> Float[Tensor, "b m d"]:
    """Return rows of each image by index."""
    first = torch.arange(index.shape[0])[:, None] * rows.shape[1]  # of each image
    return rows.flatten(0, 1).index_select(0, (first + index).flatten()).unflatten(0, index.shape)
