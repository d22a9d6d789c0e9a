// Numbers for people.
#ifndef ATTND_CLIENT_TOOL_HUMAN_H_
#define ATTND_CLIENT_TOOL_HUMAN_H_

#include <string>

namespace attnd::tool {

// "1.50 GiB", exact where it is a whole number of the unit.
std::string HumanBytes(double bytes);

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_HUMAN_H_
