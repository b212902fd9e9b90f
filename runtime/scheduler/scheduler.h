// Which sequences take part in the next step, and with how many tokens.
//
// The rule, simple on purpose:
//   * Seats: at most running_max sequences run; the others wait, first come first seated. A seat is
//     kept until the sequence is removed or, for a prefill, complete. But a prompt that had a chunk's
//     worth of tokens on its seat makes way, one a step, for a waiting prefill with less than half of
//     what it has left; it is seated again before those that came later. So short prompts do not wait
//     for long ones to end, and long ones get a chunk on for each short one that passes.
//   * Every running sequence whose prompt is done gets one token, least recently served first.
//     Where running_max is at most step_tokens_max that leaves a token for every prompt that has a seat;
//     with more seats prompts could wait until answers end.
//   * What is left of step_tokens_max is shared evenly among running prompts, at least one block
//     each, least recently served first; what nobody took goes to them again in that order. No
//     sequence gets more than chunk_tokens_max. So a short prompt behind a long one starts at once.
//   * A piece never passes its end, and ends at a multiple of 64 when it can and more remains: tiles
//     and blocks are then computed whole. It ends at a cut, too, but where the caller can hold one
//     more state one piece of each step may pass one cut, which then costs no step of its own.
//
// Pure: no clock, no threads; the same calls give the same plans. Results of sequences never depend
// on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/base/ids.h"

namespace deltamesh {

struct SchedulerOptions {
  int64_t step_tokens_max = 512;
  int64_t chunk_tokens_max = 256;
  int64_t running_max = 16;
};

// `tokens` more tokens of a sequence: one sampled token, or a piece of its prompt, which passes a cut
// after `cut` of them (0: none).
struct PlannedChunk {
  SequenceId id;
  int64_t tokens;
  int64_t cut = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);

  // A sequence computed up to `position`, with a prompt (or prefill) that ends at `end` > position.
  // When `generates`, it decodes from there until removed; else it is complete at `end`. Pieces of the
  // prompt end at `cuts`, or pass one: ascending, above `position`, at most `end`. The id must be new.
  void Add(SequenceId id, int64_t position, int64_t end, bool generates,
           std::vector<int64_t> cuts = {});
  // Unknown ids are ignored.
  void Remove(SequenceId id);

  // The next step, taken as done: decoding sequences first, then prompts. Empty when nothing is to
  // be done. With `pass_cut` one piece may pass one cut.
  std::vector<PlannedChunk> Plan(bool pass_cut = false);

  bool HasWork() const;
  int64_t running() const;
  int64_t waiting() const;
  int64_t waiting_tokens() const;  // prompt tokens not yet planned, of all sequences

 private:
  struct Entry {
    SequenceId id;
    int64_t position;
    int64_t end;
    bool generates;
    std::vector<int64_t> cuts;
    bool seated = false;
    uint64_t served = 0;  // the step that served it last; 0: none
    int64_t planned = 0;  // tokens in the plan being made
    bool passes = false;  // one cut, in the plan being made
    int64_t on_seat = 0;  // tokens since it was seated

    // The first cut after `from`, or the end.
    int64_t next_cut(int64_t from) const {
      const auto cut = std::upper_bound(cuts.begin(), cuts.end(), from);
      return cut == cuts.end() ? end : *cut;
    }
    int64_t next_stop() const {
      const int64_t cut = next_cut(position);
      return passes ? next_cut(cut) : cut;
    }
    int64_t left() const { return end - position; }
    bool prompt() const { return position < end; }
    bool complete() const { return !prompt() && !generates; }
  };

  void GiveSeats();
  void MakeWay();
  std::vector<Entry*> Seated(bool prompts);
  int64_t PlanPrompts(const std::vector<Entry*>& prompts, int64_t budget, int64_t share,
                      bool* pass_cut) const;

  const SchedulerOptions options_;
  uint64_t step_ = 0;
  std::vector<Entry> entries_;  // in order of arrival
};

}  // namespace deltamesh
