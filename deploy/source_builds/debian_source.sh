# Fetches a source package of Debian 13 on an older Debian. To be sourced.
#
#   debian_source PACKAGE DIRECTORY      unpacks PACKAGE below DIRECTORY
#
# apt does the fetching, from a list of its own, so that the system's lists stay as they are and signatures and
# checksums are verified as for any package.
# shellcheck shell=bash

debian_mirror() {
  if [ -n "${ATTND_DEBIAN_MIRROR:-}" ]; then
    echo "$ATTND_DEBIAN_MIRROR"
    return
  fi
  local codename mirror
  # shellcheck disable=SC1091
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  # shellcheck disable=SC2016  # apt fills these in
  mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
    awk -v release="$codename" '$1 == release { print $2; exit }')
  if [ -z "$mirror" ]; then
    echo "no package list of '$codename' names a Debian mirror: set ATTND_DEBIAN_MIRROR to one" >&2
    return 1
  fi
  echo "$mirror"
}

debian_source() {
  local package=$1 directory=$2 mirror
  local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  mirror=$(debian_mirror)
  mkdir -p "$directory/lists/partial"
  echo "deb-src [signed-by=$keyring] $mirror trixie main" >"$directory/sources.list"
  local options=(
    -o "Dir::Etc::SourceList=$directory/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$directory/lists" -o APT::Sandbox::User=root
    # Never written where the system keeps its own index.
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
  )
  apt-get update "${options[@]}"
  (cd "$directory" && apt-get source "${options[@]}" "$package")
}
