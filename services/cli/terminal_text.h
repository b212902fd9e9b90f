// What others sent, as a terminal may show it.
#pragma once

#include <string>
#include <string_view>

namespace deltamesh {

// Control characters, line separators and characters that turn the direction of text as escapes (\x1b,
// \u202e): nobody's name or message moves the cursor or passes for a line of ours. `text` is UTF-8.
std::string ForTerminal(std::string_view text);

}  // namespace deltamesh
