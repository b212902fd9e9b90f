#include "runtime/base/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace deltamesh {
namespace {

spdlog::level::level_enum ToSpd(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// Quoted when a reader splitting on spaces would be misled; control characters are escaped so that
// text from outside cannot forge a log line.
void AppendValue(const std::string& value, std::string* out) {
  const bool plain = !value.empty() && value.find_first_of(" \"=\\\n\r\t") == std::string::npos;
  if (plain) {
    out->append(value);
    return;
  }
  out->push_back('"');
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof(buffer), "\\x%02x", static_cast<unsigned>(c) & 0xFF);
      out->append(buffer);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

}  // namespace

LogField::LogField(std::string_view k, double v) : key(k) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.6g", v);
  value = buffer;
}

void InitLog(std::string_view component, LogLevel level) {
  auto logger = std::make_shared<spdlog::logger>(std::string(component),
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %n %v", spdlog::pattern_time_type::utc);
  logger->set_level(ToSpd(level));
  spdlog::set_default_logger(std::move(logger));
}

void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  if (!spdlog::should_log(ToSpd(level))) return;
  std::string line(event);
  for (const LogField& field : fields) {
    line.push_back(' ');
    line.append(field.key);
    line.push_back('=');
    AppendValue(field.value, &line);
  }
  spdlog::log(ToSpd(level), "{}", line);
}

}  // namespace deltamesh
