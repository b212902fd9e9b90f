#include "runtime/scheduler/scheduler.h"

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr int64_t kGrid = 64;  // where pieces prefer to end

// The most tokens up to `limit` that keep the rules for ends.
int64_t PieceTokens(int64_t position, int64_t end, int64_t limit) {
  const int64_t stop = std::min(end, position + limit);
  if (stop == end) return stop - position;
  const int64_t aligned = stop / kGrid * kGrid;
  return (aligned > position ? aligned : stop) - position;
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options) : options_(options) {
  CHECK(options.step_tokens_max >= 1 && options.chunk_tokens_max >= 1 && options.running_max >= 1,
        "step %d, chunk %d, running %d", options.step_tokens_max, options.chunk_tokens_max,
        options.running_max);
}

void Scheduler::Add(SequenceId id, int64_t position, int64_t end, bool generates,
                    std::vector<int64_t> cuts) {
  CHECK(position >= 0 && position < end, "sequence %d: position %d, end %d", id.value, position,
        end);
  for (const Entry& e : entries_) CHECK(e.id != id, "sequence %d twice", id.value);
  CHECK(std::is_sorted(cuts.begin(), cuts.end()) &&
            (cuts.empty() || (cuts.front() > position && cuts.back() <= end)),
        "sequence %d: cuts must ascend between position %d and end %d", id.value, position, end);
  entries_.push_back({.id = id,
                      .position = position,
                      .end = end,
                      .generates = generates,
                      .cuts = std::move(cuts)});
}

void Scheduler::Remove(SequenceId id) {
  std::erase_if(entries_, [&](const Entry& e) { return e.id == id; });
}

std::vector<PlannedChunk> Scheduler::Plan(bool pass_cut) {
  GiveSeats();
  ++step_;
  int64_t budget = options_.step_tokens_max;
  std::vector<PlannedChunk> plan;
  const auto take = [&](Entry& e, int64_t tokens) {
    const int64_t cut = e.prompt() ? e.next_cut(e.position) - e.position : 0;
    plan.push_back({.id = e.id, .tokens = tokens, .cut = cut < tokens ? cut : 0});
    e.position += tokens;
    e.on_seat += tokens;
    e.served = step_;
  };

  std::vector<Entry*> prompts = Seated(true);  // before decoding moves anyone
  for (Entry* e : Seated(false)) {
    if (budget == 0) break;
    take(*e, 1);
    --budget;
  }
  if (prompts.empty() || budget == 0) return plan;

  for (Entry* e : prompts) {
    e->planned = 0;
    e->passes = false;
  }
  const int64_t share = std::max<int64_t>(kGrid, budget / static_cast<int64_t>(prompts.size()));
  budget = PlanPrompts(prompts, budget, share, &pass_cut);
  PlanPrompts(prompts, budget, options_.chunk_tokens_max, &pass_cut);
  for (Entry* e : prompts) {
    if (e->planned > 0) take(*e, e->planned);
  }
  return plan;
}

void Scheduler::GiveSeats() {
  int64_t taken = 0;
  for (Entry& e : entries_) {
    if (e.complete()) e.seated = false;
    taken += e.seated;
  }
  for (Entry& e : entries_) {
    if (taken == options_.running_max) return MakeWay();
    if (e.seated || e.complete()) continue;
    e.seated = true;
    e.on_seat = 0;
    ++taken;
  }
}

void Scheduler::MakeWay() {
  Entry *shortest = nullptr, *longest = nullptr;
  for (Entry& e : entries_) {
    if (!e.prompt()) continue;
    if (!e.seated) {
      if (e.generates) continue;  // it would keep the seat for its answer
      if (shortest == nullptr || e.left() < shortest->left()) shortest = &e;
    } else if (e.on_seat >= options_.chunk_tokens_max) {
      if (longest == nullptr || e.left() > longest->left()) longest = &e;
    }
  }
  if (shortest == nullptr || longest == nullptr || 2 * shortest->left() >= longest->left()) return;
  longest->seated = false;
  shortest->seated = true;
  shortest->on_seat = 0;
}

std::vector<Scheduler::Entry*> Scheduler::Seated(bool prompts) {
  std::vector<Entry*> found;
  for (Entry& e : entries_) {
    if (e.seated && e.prompt() == prompts) found.push_back(&e);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Entry* a, const Entry* b) { return a->served < b->served; });
  return found;
}

// Lets every prompt grow to `share` tokens while the budget lasts; returns what is left of it. The first
// whose cut is in the way may pass it.
int64_t Scheduler::PlanPrompts(const std::vector<Entry*>& prompts, int64_t budget, int64_t share,
                               bool* pass_cut) const {
  for (Entry* e : prompts) {
    const int64_t limit = std::min({share, options_.chunk_tokens_max, e->planned + budget});
    const int64_t stop = e->next_stop();
    if (*pass_cut && stop < e->end && stop - e->position < limit) {
      e->passes = true;
      *pass_cut = false;
    }
    const int64_t tokens = std::max(e->planned, PieceTokens(e->position, e->next_stop(), limit));
    budget -= tokens - e->planned;
    e->planned = tokens;
  }
  return budget;
}

bool Scheduler::HasWork() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& e) { return !e.complete(); });
}

int64_t Scheduler::running() const {
  return std::count_if(entries_.begin(), entries_.end(),
                       [](const Entry& e) { return e.seated && !e.complete(); });
}

int64_t Scheduler::waiting() const {
  return std::count_if(entries_.begin(), entries_.end(),
                       [](const Entry& e) { return !e.seated && !e.complete(); });
}

int64_t Scheduler::waiting_tokens() const {
  int64_t tokens = 0;
  for (const Entry& e : entries_) tokens += std::max<int64_t>(0, e.end - e.position);
  return tokens;
}

}  // namespace deltamesh
