#include "runtime/text/splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <string>

#include "runtime/text/utf8.h"

namespace deltamesh {
namespace {

constexpr size_t kJitStackStart = 32 * 1024;
constexpr size_t kJitStackMost = 64 * 1024 * 1024;

// White space is spelled out (Unicode White_Space) because \s differs: it has U+180E.
#define W_                                                                                       \
  "\\t-\\r\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}" \
  "\\x{3000}"
// Han by script, not by script extensions (those have U+3001 and more). The ranges were assigned
// after the Unicode version of some PCRE2 packages.
#define HAN_ "[\\p{sc:Han}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}]"
#define UPPER_ "(?:(?!" HAN_ ")[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}])"
#define LOWER_ "(?:(?!" HAN_ ")[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}])"
#define LEAD_ "[^\\r\\n\\p{L}\\p{N}]?"
#define SUFFIX_ "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

// Ordered alternatives. Every character starts some alternative, so matches cover the whole text.
constexpr char kPattern[] = HAN_
    "+"                                      // a run of Han
    "|" LEAD_ UPPER_ "*" LOWER_ "+" SUFFIX_  // a word with a lower-case or caseless part
    "|" LEAD_ UPPER_ "+" LOWER_ "*" SUFFIX_  // a word without
    "|\\p{N}{1,3}"                           // up to three digits
    "| ?[^" W_
    "\\p{L}\\p{N}]+[\\r\\n]*"  // punctuation and symbols, with line ends
    "|[" W_
    "]*[\\r\\n]+"  // blanks up to the last line end
    "|[" W_ "]+(?![^" W_
    "])"  // blanks but the last before a word
    "|[" W_ "]+";

#undef W_
#undef HAN_
#undef UPPER_
#undef LOWER_
#undef LEAD_
#undef SUFFIX_

std::string PcreError(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

struct CodeDeleter {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
};
struct MatchDataDeleter {
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
};
struct ContextDeleter {
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
};
struct StackDeleter {
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};

void CutRuns(std::string_view slice, std::vector<std::string_view>& out) {
  size_t begin = 0;
  size_t run = 0;
  bool blank = false;
  for (size_t i = 0; i < slice.size();) {
    const Utf8Char c = Utf8CharAt(slice, i);
    const bool is_blank = IsPythonSpace(c.code);
    if (is_blank != blank) run = 0;
    blank = is_blank;
    if (++run > kMaxRunChars) {
      out.push_back(slice.substr(begin, i - begin));
      begin = i;
      run = 1;
    }
    i += c.bytes;
  }
  out.push_back(slice.substr(begin));
}

}  // namespace

std::vector<std::string_view> CutGiantText(std::string_view text) {
  std::vector<std::string_view> out;
  if (text.size() <= kMaxRunChars) {  // as many bytes as characters at most: nothing to cut
    if (!text.empty()) out.push_back(text);
    return out;
  }
  size_t begin = 0;
  size_t chars = 0;
  for (size_t i = 0; i < text.size(); i += Utf8CharAt(text, i).bytes) {
    if (chars == kMaxSliceChars) {
      CutRuns(text.substr(begin, i - begin), out);
      begin = i;
      chars = 0;
    }
    ++chars;
  }
  CutRuns(text.substr(begin), out);
  return out;
}

struct Splitter::Compiled {
  std::unique_ptr<pcre2_code, CodeDeleter> code;
};

class Splitter::Scratch {
 public:
  explicit Scratch(const pcre2_code* code)
      : data(pcre2_match_data_create_from_pattern(code, nullptr)),
        context(pcre2_match_context_create(nullptr)),
        stack(pcre2_jit_stack_create(kJitStackStart, kJitStackMost, nullptr)) {
    CHECK(data != nullptr && context != nullptr && stack != nullptr, "out of memory");
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }

  std::unique_ptr<pcre2_match_data, MatchDataDeleter> data;
  std::unique_ptr<pcre2_match_context, ContextDeleter> context;
  std::unique_ptr<pcre2_jit_stack, StackDeleter> stack;
};

void Splitter::ScratchDeleter::operator()(Scratch* scratch) const { delete scratch; }

Splitter::Splitter(std::unique_ptr<Compiled> compiled) : compiled_(std::move(compiled)) {}
Splitter::Splitter(Splitter&&) noexcept = default;
Splitter& Splitter::operator=(Splitter&&) noexcept = default;
Splitter::~Splitter() = default;

absl::StatusOr<Splitter> Splitter::Create() {
  // Anchored here, not at each match: there it would switch machine code off.
  int error = 0;
  size_t offset = 0;
  auto compiled = std::make_unique<Compiled>();
  compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern), sizeof(kPattern) - 1,
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset,
                                     nullptr));
  if (compiled->code == nullptr) {
    return Internal("split pattern: PCRE2 refuses it at offset %d: %s; use PCRE2 10.40 or later",
                    offset, PcreError(error));
  }
  // Without machine code (a build or a system that forbids it) matching is slower, not different.
  (void)pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE);
  return Splitter(std::move(compiled));
}

Splitter::ScratchPtr Splitter::NewScratch() const {
  return ScratchPtr(new Scratch(compiled_->code.get()));
}

absl::Status Splitter::Split(std::string_view text, Scratch& scratch,
                             std::vector<std::string_view>& pieces) const {
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const size_t* span = pcre2_get_ovector_pointer(scratch.data.get());
  size_t at = 0;
  while (at < text.size()) {
    const int rc = pcre2_match(compiled_->code.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK,
                               scratch.data.get(), scratch.context.get());
    if (rc < 0 || span[1] <= at) {
      return Internal("split pattern: no piece at byte %d of %d: %s", at, text.size(),
                      rc < 0 ? PcreError(rc) : "an empty match");
    }
    pieces.push_back(text.substr(at, span[1] - at));
    at = span[1];
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
