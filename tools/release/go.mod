// What "make release" needs beyond programs that exist: licence texts, archives with fixed times, SBOMs of artefacts, provenance.
module github.com/tandem-gpu/tandem/tools/release

go 1.26.0
