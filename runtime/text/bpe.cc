#include "runtime/text/bpe.h"

#include <algorithm>
#include <limits>

namespace deltamesh {

void BytePairEncoder::Offer(std::string_view piece, uint32_t start) {
  const uint32_t middle = end_[start];
  if (middle >= piece.size()) return;
  const uint32_t end = end_[middle];
  const TokenId rank = vocabulary_.Find(piece.substr(start, end - start));
  if (rank == Vocabulary::kNone) return;
  heap_.push_back({rank, start, end});
}

void BytePairEncoder::Encode(std::string_view piece, std::vector<TokenId>& out) {
  if (piece.empty()) return;
  if (const TokenId whole = vocabulary_.Find(piece); whole != Vocabulary::kNone) {
    out.push_back(whole);
    return;
  }
  CHECK(piece.size() < std::numeric_limits<uint32_t>::max(), "piece of %d bytes", piece.size());
  const auto n = static_cast<uint32_t>(piece.size());
  end_.resize(n);
  before_.resize(n);
  id_.resize(n);
  heap_.clear();
  for (uint32_t i = 0; i < n; ++i) {
    end_[i] = i + 1;
    before_[i] = i - 1;  // wraps for the first; never followed
    id_[i] = vocabulary_.Find(piece.substr(i, 1));
  }
  // Heap order: lowest rank first, leftmost of equals.
  const auto later = [](const Merge& a, const Merge& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.start > b.start;
  };
  for (uint32_t i = 0; i + 1 < n; ++i) Offer(piece, i);
  std::make_heap(heap_.begin(), heap_.end(), later);

  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const Merge merge = heap_.back();
    heap_.pop_back();
    // Stale when either half has since changed: then the pair no longer spans [start, end).
    if (id_[merge.start] == Vocabulary::kNone) continue;
    const uint32_t middle = end_[merge.start];
    if (middle >= n || end_[middle] != merge.end) continue;

    id_[merge.start] = merge.rank;
    id_[middle] = Vocabulary::kNone;
    end_[merge.start] = merge.end;
    if (merge.end < n) before_[merge.end] = merge.start;
    const auto offer = [&](uint32_t start) {
      const size_t size = heap_.size();
      Offer(piece, start);
      if (heap_.size() > size) std::push_heap(heap_.begin(), heap_.end(), later);
    };
    offer(merge.start);
    if (merge.start > 0) offer(before_[merge.start]);
  }
  for (uint32_t i = 0; i < n; i = end_[i]) out.push_back(id_[i]);
}

}  // namespace deltamesh
