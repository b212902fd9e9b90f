// Structured logs: one line per event, `key=value` pairs after the event name, to stderr.
//   LogInfo("handoff.complete", {{"request", id}, {"bytes", 4096}, {"seconds", 0.02}});
// The first function that knows a cause logs it, once, with the request id where there is one.
// Thread-safe.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace deltamesh {

// A value already turned to text; strings with spaces or quotes are quoted when printed.
struct LogField {
  std::string key;
  std::string value;

  LogField(std::string_view k, std::string_view v) : key(k), value(v) {}
  LogField(std::string_view k, const std::string& v) : key(k), value(v) {}
  LogField(std::string_view k, const char* v) : key(k), value(v) {}
  LogField(std::string_view k, bool v) : key(k), value(v ? "true" : "false") {}
  LogField(std::string_view k, double v);
  template <typename T>
  requires std::is_integral_v<T> LogField(std::string_view k, T v)
      : key(k), value(std::to_string(v)) {}
};

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Lines below `level` are dropped. `component` (a role name) is printed in every line.
void InitLog(std::string_view component, LogLevel level);

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields);

inline void LogDebug(std::string_view e, std::initializer_list<LogField> f = {}) {
  Log(LogLevel::kDebug, e, f);
}
inline void LogInfo(std::string_view e, std::initializer_list<LogField> f = {}) {
  Log(LogLevel::kInfo, e, f);
}
inline void LogWarning(std::string_view e, std::initializer_list<LogField> f = {}) {
  Log(LogLevel::kWarning, e, f);
}
inline void LogError(std::string_view e, std::initializer_list<LogField> f = {}) {
  Log(LogLevel::kError, e, f);
}

}  // namespace deltamesh
