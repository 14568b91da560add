// Package server is the control API: HTTP and JSON under /v1 on a unix
// socket, for people, scripts and coding agents on the host. Guests never
// reach it.
//
// Every request takes the same way: authenticate (the peer's credentials),
// authorize (the access column of the route table in routes.go), decode and
// check (huma, strict), call one method of a service, encode. The OpenAPI
// document is made from the same table, so a route that is not in it does not
// exist.
package server

//go:generate go test . -run TestGenerated -update
