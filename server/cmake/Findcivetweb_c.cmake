# Finds the C part of civetweb, an HTTP server. Defines civetweb_c::civetweb_c, civetweb_c_FOUND and civetweb_c_VERSION.
#
# Not by civetweb's own package file: it wants its C++ part and its program too, which Debian has in other packages.

find_path(civetweb_c_INCLUDE_DIR civetweb.h)
find_library(civetweb_c_LIBRARY civetweb)
mark_as_advanced(civetweb_c_INCLUDE_DIR civetweb_c_LIBRARY)

if(civetweb_c_INCLUDE_DIR)
  file(STRINGS "${civetweb_c_INCLUDE_DIR}/civetweb.h" _version_line REGEX "^#define CIVETWEB_VERSION \"")
  string(REGEX REPLACE "^#define CIVETWEB_VERSION \"([0-9.]+).*" "\\1" civetweb_c_VERSION "${_version_line}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  civetweb_c
  REQUIRED_VARS civetweb_c_LIBRARY civetweb_c_INCLUDE_DIR
  VERSION_VAR civetweb_c_VERSION
  REASON_FAILURE_MESSAGE "attnd serves its metrics and its status page by civetweb: run deploy/setup.")

if(civetweb_c_FOUND AND NOT TARGET civetweb_c::civetweb_c)
  add_library(civetweb_c::civetweb_c UNKNOWN IMPORTED)
  set_target_properties(civetweb_c::civetweb_c PROPERTIES IMPORTED_LOCATION "${civetweb_c_LIBRARY}"
                                                          INTERFACE_INCLUDE_DIRECTORIES "${civetweb_c_INCLUDE_DIR}")
endif()
