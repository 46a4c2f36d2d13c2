// Package kubeapi is a client for the part of Kubernetes' API that an agent needs: claims, the Node and the agent's pod are read; the labels of
// the Node are watched; ResourceSlices are listed, watched, created, updated and deleted; NodeFeature objects are written. It has no cache and does not repeat requests, except once after an expired token.
//
// Against a network, credentials and servers that change: the files with the token and the CA certificates are read for each request
// and each TLS handshake, each request has a deadline, answers are bounded, and redirects are not followed, for they would get the
// token.
package kubeapi
