# Finds oneDNN 3.6 or newer with the BRGeMM ukernel (dnnl_ukernel.hpp; built with ONEDNN_EXPERIMENTAL_UKERNEL).
#
# Defines dnnl::ukernel, dnnl_ukernel_FOUND and dnnl_ukernel_VERSION. Looks first for the static part that deploy/setup
# builds (ATTND_DEPS_PREFIX), then for the system's libdnnl. find_package(dnnl CONFIG) is no use on Debian: its file
# asks for OpenCL's development files.

set(_prefix_library "${ATTND_DEPS_PREFIX}/lib/libdnnl_ukernel.a")
if(EXISTS "${_prefix_library}")
  set(_include_hints PATHS "${ATTND_DEPS_PREFIX}/include" NO_DEFAULT_PATH)
  set(_library_search NAMES dnnl_ukernel PATHS "${ATTND_DEPS_PREFIX}/lib" NO_DEFAULT_PATH)
else()
  set(_include_hints)
  set(_library_search NAMES dnnl)
endif()
find_path(dnnl_ukernel_INCLUDE_DIR oneapi/dnnl/dnnl_ukernel.hpp ${_include_hints})
find_library(dnnl_ukernel_LIBRARY ${_library_search})
mark_as_advanced(dnnl_ukernel_INCLUDE_DIR dnnl_ukernel_LIBRARY)

set(_reason "oneDNN was not found.")
if(dnnl_ukernel_INCLUDE_DIR AND dnnl_ukernel_LIBRARY)
  file(STRINGS "${dnnl_ukernel_INCLUDE_DIR}/oneapi/dnnl/dnnl_version.h" _version_lines
       REGEX "^#define DNNL_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "#define DNNL_VERSION_[A-Z]+ ([0-9]+)" "\\1" _version "${_version_lines}")
  list(JOIN _version "." dnnl_ukernel_VERSION)

  # Declared is not enough (the header ships either way, its contents behind a macro of the library's build), so link.
  include(CheckCXXSourceCompiles)
  include(CMakePushCheckState)
  find_package(Threads REQUIRED)
  cmake_push_check_state(RESET)
  set(CMAKE_REQUIRED_INCLUDES "${dnnl_ukernel_INCLUDE_DIR}")
  set(CMAKE_REQUIRED_LIBRARIES "${dnnl_ukernel_LIBRARY}" Threads::Threads ${CMAKE_DL_LIBS})
  set(CMAKE_REQUIRED_QUIET ON)
  check_cxx_source_compiles("
    #include <oneapi/dnnl/dnnl_ukernel.hpp>
    int main() {
      dnnl::ukernel::brgemm kernel;
      dnnl::ukernel::brgemm::release_hw_context();
      return kernel ? 1 : 0;
    }" dnnl_ukernel_${dnnl_ukernel_VERSION}_USABLE)
  cmake_pop_check_state()
  set(_usable "${dnnl_ukernel_${dnnl_ukernel_VERSION}_USABLE}")
  set(_reason "oneDNN ${dnnl_ukernel_VERSION} at ${dnnl_ukernel_LIBRARY} lacks the BRGeMM ukernel.")
elseif(dnnl_ukernel_LIBRARY)
  set(_reason "oneDNN at ${dnnl_ukernel_LIBRARY} is older than 3.6 (it has no dnnl_ukernel.hpp).")
endif()

if(NOT _usable)
  # A later configure, after the installation that the message asks for, must look again.
  unset(dnnl_ukernel_${dnnl_ukernel_VERSION}_USABLE CACHE)
  unset(dnnl_ukernel_INCLUDE_DIR CACHE)
  unset(dnnl_ukernel_LIBRARY CACHE)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  dnnl_ukernel
  REQUIRED_VARS dnnl_ukernel_LIBRARY dnnl_ukernel_INCLUDE_DIR _usable
  VERSION_VAR dnnl_ukernel_VERSION
  REASON_FAILURE_MESSAGE
    "${_reason} attnd needs oneDNN 3.6 or newer, built with ONEDNN_EXPERIMENTAL_UKERNEL=ON: run deploy/setup, or set ATTND_DEPS_PREFIX or CMAKE_PREFIX_PATH to such a build.")

if(dnnl_ukernel_FOUND AND NOT TARGET dnnl::ukernel)
  add_library(dnnl::ukernel UNKNOWN IMPORTED)
  set_target_properties(
    dnnl::ukernel
    PROPERTIES IMPORTED_LOCATION "${dnnl_ukernel_LIBRARY}"
               INTERFACE_INCLUDE_DIRECTORIES "${dnnl_ukernel_INCLUDE_DIR}"
               INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS}")
endif()
