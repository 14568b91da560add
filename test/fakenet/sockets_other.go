//go:build !linux

package fakenet

import "errors"

// sockets returns an error: macOS has no such sockets that keep the borders of datagrams.
func sockets(int) ([2]int, error) { return [2]int{}, errors.ErrUnsupported }
