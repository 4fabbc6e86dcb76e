#!/bin/sh
# Builds kube-apiserver and kube-controller-manager 1.20.2 from the source package of Debian 12, and unpacks its etcd,
# into FOLDER/bin. Needs apt on Debian 12 and nothing installed: neither root nor Go; later releases ship kubectl alone.
#   sh tests/support/build_kubernetes.sh FOLDER
set -eu

mkdir -p "$1/bin" "$1/build/apt/lists/partial" "$1/build/apt/cache/archives/partial" "$1/build/sources" "$1/build/src"
folder=$(cd "$1" && pwd)
build=$folder/build
cd "$build"

# This machine's own archives, with their sources switched on, in lists of our own.
for list in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
    [ ! -f "$list" ] || sed -E 's/^Types: deb$/Types: deb deb-src/; s/^(deb .*)$/\1\n\1/; ' "$list" |
        awk '/^deb / && $0 == last { sub(/^deb /, "deb-src ") } { last = $0; print }' >"sources/$(basename "$list")"
done
apt() {
    apt-get -q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$build/sources" -o Dir::State::lists="$build/apt/lists" \
        -o Dir::Cache="$build/apt/cache" -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=true "$@"
}
apt update
apt source --download-only kubernetes=1.20.5+really1.20.2-1.1+deb12u1
apt download golang-1.19-go golang-1.19-src etcd-server
for package in ./*.deb; do dpkg -x "$package" root; done
cp root/usr/bin/etcd "$folder/bin"

# Built as a GOPATH, as upstream did. Only the description of the API is not in the archive: it is generated first.
tree=$build/src/k8s.io/kubernetes
mkdir -p "$tree"
tar -xzf kubernetes_*.orig.tar.gz -C "$tree" --strip-components=1
export GOROOT="$build/root/usr/lib/go-1.19" GOPATH="$build" GOCACHE="$build/go-cache"
export GO111MODULE=off GOPROXY=off CGO_ENABLED=0 PATH="$build/root/usr/lib/go-1.19/bin:$PATH"
cd "$tree"
go build -o "$build/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
described=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg staging/src/k8s.io cmd plugin |
    grep -v -e /code-generator/ -e /sample-apiserver/ -e _test.go | xargs -n1 dirname | LC_ALL=C sort -u |
    sed 's#^staging/src/#vendor/#; s#^#k8s.io/kubernetes/#' | paste -sd,)
"$build/openapi-gen" --logtostderr -i "$described" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$build/violations" -o "$build/src"
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
for program in kube-apiserver kube-controller-manager; do
    go build -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" \
        -o "$folder/bin/$program" "./cmd/$program"
done
rm -rf "$build"
"$folder/bin/kube-apiserver" --version
echo "Now: KUBERNETES_BIN=$folder/bin pytest tests/executors/test_kubernetes_genuine.py"
