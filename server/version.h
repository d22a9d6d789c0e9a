// The version of this build, from the project's CMakeLists.txt.
#ifndef ATTND_SERVER_VERSION_H_
#define ATTND_SERVER_VERSION_H_

namespace attnd {

inline constexpr char kVersion[] = ATTND_VERSION;

}  // namespace attnd

#endif  // ATTND_SERVER_VERSION_H_
