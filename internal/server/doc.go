// Package server is the control API: HTTP and JSON under /v1 on a unix socket,
// for users, scripts and coding agents on the host. Guests cannot reach it.
//
// Every request is handled in the same order: authenticate (the peer's
// credentials), authorize (the access column of the route table in routes.go),
// decode and check (huma, strict), call one method of a service, encode. The
// OpenAPI document is generated from the same table, so it has every route.
package server

//go:generate go test . -run TestGenerated -update
