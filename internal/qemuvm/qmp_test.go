package qemuvm

import "testing"

func FuzzQMP(f *testing.F) {
	f.Add([]byte(`{"QMP": {"version": {}, "capabilities": []}}`))
	f.Add([]byte(`{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-reset"}}`))
	f.Add([]byte(`{"return":{},"id":7}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := parseQMP(line)
		if err == nil && m.Event == "" && m.ID < -1 {
			(&QMP{waiting: map[int]chan qmpMessage{}}).reply(m) // an id without a request
		}
	})
}
