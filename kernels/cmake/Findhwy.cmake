# Finds Google Highway 1.1 or newer. Defines hwy::hwy, hwy_FOUND and hwy_VERSION.
#
# Looks first where deploy/setup builds it (ATTND_DEPS_PREFIX), then in the system. Header and library are taken from
# the same place: Debian 12's own Highway 1.0 must not be mixed in, its bf16 operations are slow.

if(EXISTS "${ATTND_DEPS_PREFIX}/lib/libhwy.a")
  find_path(hwy_INCLUDE_DIR hwy/highway.h PATHS "${ATTND_DEPS_PREFIX}/include" NO_DEFAULT_PATH)
  find_library(hwy_LIBRARY hwy PATHS "${ATTND_DEPS_PREFIX}/lib" NO_DEFAULT_PATH)
else()
  find_path(hwy_INCLUDE_DIR hwy/highway.h)
  find_library(hwy_LIBRARY hwy)
endif()
mark_as_advanced(hwy_INCLUDE_DIR hwy_LIBRARY)

if(hwy_INCLUDE_DIR)
  file(STRINGS "${hwy_INCLUDE_DIR}/hwy/base.h" _version_lines REGEX "^#define HWY_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX REPLACE "#define HWY_[A-Z]+ ([0-9]+)" "\\1" _version "${_version_lines}")
  list(JOIN _version "." hwy_VERSION)
endif()

include(FindPackageHandleStandardArgs)
if(hwy_VERSION AND hwy_VERSION VERSION_LESS 1.1)
  set(_new_enough FALSE)
  set(_reason "Highway ${hwy_VERSION} at ${hwy_LIBRARY} is too old.")
else()
  set(_new_enough TRUE)
  set(_reason "Highway was not found.")
endif()
if(NOT _new_enough)
  # A later configure, after the installation that the message asks for, must look again.
  unset(hwy_INCLUDE_DIR CACHE)
  unset(hwy_LIBRARY CACHE)
endif()
find_package_handle_standard_args(
  hwy
  REQUIRED_VARS hwy_LIBRARY hwy_INCLUDE_DIR _new_enough
  VERSION_VAR hwy_VERSION
  REASON_FAILURE_MESSAGE
    "${_reason} attnd needs Highway 1.1 or newer: run deploy/setup, or set ATTND_DEPS_PREFIX or CMAKE_PREFIX_PATH to such a build.")

if(hwy_FOUND AND NOT TARGET hwy::hwy)
  add_library(hwy::hwy UNKNOWN IMPORTED)
  set_target_properties(hwy::hwy PROPERTIES IMPORTED_LOCATION "${hwy_LIBRARY}"
                                            INTERFACE_INCLUDE_DIRECTORIES "${hwy_INCLUDE_DIR}")
  if(hwy_LIBRARY MATCHES "\\.so")
    set_property(TARGET hwy::hwy PROPERTY INTERFACE_COMPILE_DEFINITIONS HWY_SHARED_DEFINE)
  endif()
endif()
