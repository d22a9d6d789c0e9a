# Finds xxHash, a fast checksum. Defines xxhash::xxhash, xxhash_FOUND and xxhash_VERSION, and for those who use the target
# ATTND_XXHASH_DISPATCHES.
#
# Not by pkg-config, which would be one more program to install, nor by a package file: Debian's has none.

find_path(xxhash_INCLUDE_DIR xxhash.h)
find_library(xxhash_LIBRARY xxhash)
mark_as_advanced(xxhash_INCLUDE_DIR xxhash_LIBRARY)

if(xxhash_INCLUDE_DIR)
  set(xxhash_VERSION "")
  foreach(part MAJOR MINOR RELEASE)
    file(STRINGS "${xxhash_INCLUDE_DIR}/xxhash.h" _version_line REGEX "^#define XXH_VERSION_${part} +[0-9]+")
    string(REGEX REPLACE "^#define XXH_VERSION_${part} +([0-9]+).*" "\\1" _version_part "${_version_line}")
    list(APPEND xxhash_VERSION "${_version_part}")
  endforeach()
  list(JOIN xxhash_VERSION "." xxhash_VERSION)
endif()

include(CheckCXXSourceCompiles)
include(FindPackageHandleStandardArgs)
# XXH3's values are stable from 0.8.0 on.
find_package_handle_standard_args(
  xxhash
  REQUIRED_VARS xxhash_LIBRARY xxhash_INCLUDE_DIR
  VERSION_VAR xxhash_VERSION
  REASON_FAILURE_MESSAGE "Snapshots of sessions are checked by xxHash: run deploy/setup.")

if(xxhash_FOUND AND NOT TARGET xxhash::xxhash)
  add_library(xxhash::xxhash UNKNOWN IMPORTED)
  set_target_properties(xxhash::xxhash PROPERTIES IMPORTED_LOCATION "${xxhash_LIBRARY}"
                                                  INTERFACE_INCLUDE_DIRECTORIES "${xxhash_INCLUDE_DIR}")
  # Debian builds it with the choice of AVX2 and AVX-512 at run time; others may not.
  set(CMAKE_REQUIRED_LIBRARIES xxhash::xxhash)
  check_cxx_source_compiles("#include <xxh_x86dispatch.h>
                             int main() { return XXH3_64bits_withSeed(\"\", 0, 1) == 0; }" xxhash_DISPATCHES)
  unset(CMAKE_REQUIRED_LIBRARIES)
  set_target_properties(xxhash::xxhash PROPERTIES INTERFACE_COMPILE_DEFINITIONS
                                                  "ATTND_XXHASH_DISPATCHES=$<BOOL:${xxhash_DISPATCHES}>")
endif()
